"""Factors on their way into files: part by part, hashed beside the writing, counted by a bar."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from k3tune.errors import AdapterError
from k3tune.lora.export.written import WrittenModule
from k3tune.lora.keys import FactorName
from k3tune.lora.read import FactorReader, all_finite, stored_dtype
from k3tune.lora.shards import Entry, Pending, tensor_buffer
from k3tune.published.safetensors_files import StoredTensor

DIGESTS_NAME = "tensors.sha256"
# What the hashing thread gets at a time: it and the writer hand over to each other rarely.
_BATCH_BYTES = 2 << 20
_WAITING = 3
RUN_BYTES = 256 << 20


def pending_tensors(
    modules: Sequence[WrittenModule], reader: FactorReader, most_bytes: int = RUN_BYTES
) -> list[Pending]:
    """Every tensor to write.

    What is written as it is stored comes first, in the order it is stored: neighbours there are
    neighbours here, and go through in large pieces. The rest follows, matrix by matrix.

    Args:
        modules: to write.
        reader: stays open as long as the tensors are read.
        most_bytes: of tensors that go through together.
    """
    stored: list[tuple[StoredTensor, Entry]] = []
    computed: list[Pending] = []
    for module in modules:
        for half in "AB":
            for entry, rows in _entries(module, half):
                place = module.place(half, rows[0])
                if place is None:
                    computed.append(Pending([entry], _matrices(module, half, entry.key, rows)))
                else:
                    stored.append((place, entry))
    # one shared matrix may go to many names, so ties are many
    stored.sort(key=lambda item: (item[0].file, item[0].offset))
    return [*(_run(group, reader) for group in _neighbours(stored, most_bytes)), *computed]


def _entries(module: WrittenModule, half: str) -> Iterator[tuple[Entry, Sequence[int | None]]]:
    """Tensors of a half, with the experts whose matrices each holds."""
    dtype = module.dtypes[half]
    if module.stacked:
        rows = range(1 if half in module.shared else module.shape.num_experts or 0)
        shape = (len(rows), *module.matrix_shape(half, None))
        yield Entry(FactorName(module.name, None, half).key, dtype, shape), rows
        return
    for expert in (None,) if half in module.shared else module.experts:
        key = FactorName(module.name, expert, half).key
        yield Entry(key, dtype, module.matrix_shape(half, expert)), (expert,)


def _neighbours(
    stored: Sequence[tuple[StoredTensor, Entry]], most_bytes: int
) -> Iterator[list[tuple[StoredTensor, Entry]]]:
    group: list[tuple[StoredTensor, Entry]] = []
    size = 0
    for place, entry in stored:
        if group:
            last = group[-1][0]
            adjoins = (last.file, last.offset + last.size_bytes) == (place.file, place.offset)
            fits = size + place.size_bytes <= most_bytes
            if not (adjoins and fits and last.dtype == place.dtype):
                yield group
                group, size = [], 0
        group.append((place, entry))
        size += place.size_bytes
    if group:
        yield group


def _run(group: Sequence[tuple[StoredTensor, Entry]], reader: FactorReader) -> Pending:
    first = group[0][0]
    width = stored_dtype(first).itemsize
    size = sum(place.size_bytes for place, _ in group)
    whole = first._replace(shape=(size // width,), size_bytes=size)

    def parts() -> Iterator[Tensor]:
        try:
            yield from reader.chunks(group[0][1].key, whole)
        except AdapterError:
            # one of them is not finite: say which
            for place, entry in group:
                for _ in reader.chunks(entry.key, place):
                    pass
            raise

    return Pending([entry for _, entry in group], parts, reader.recycle)


def _matrices(
    module: WrittenModule, half: str, key: str, rows: Sequence[int | None]
) -> Callable[[], Iterator[Tensor]]:
    def parts() -> Iterator[Tensor]:
        for row in rows:
            if half in module.shared and module.source is not None:
                row = module.source.adapted[0]
            matrix = module.matrix(half, row)
            yield matrix if module.keeps_values(half) else _checked(key, matrix)

    return parts


def _checked(key: str, matrix: Tensor) -> Tensor:
    if not all_finite(matrix):
        raise AdapterError(
            f"{key}: expected finite values, found some that are not once written as "
            f"{matrix.dtype}: choose a wider dtype"
        )
    return matrix


class DigestLog:
    """Writes the SHA-256 of every tensor to a file, a line each as ``sha256sum`` does.

    A thread hashes some MB at a time while the caller writes the next; a context manager.
    """

    def __init__(self, file: Path, advance: Callable[[int], Any]) -> None:
        self._stream: IO[str] = file.open("w", encoding="utf-8")
        self._pool = ThreadPoolExecutor(1)
        self._tasks: deque[Future[None]] = deque()
        self._batch: list[tuple[Tensor, Pending]] = []
        self._batch_bytes = 0
        # tensors to come, and how much of the first is hashed: the thread's own
        self._tensors: deque[tuple[str, int]] = deque()
        self._hasher, self._done = hashlib.sha256(), 0
        self._advance = advance

    def __enter__(self) -> "DigestLog":
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self._submit()
                while self._tasks:
                    self._tasks.popleft().result()
        finally:
            self._pool.shutdown()
            self._stream.close()

    def watch(self, pending: Pending) -> Pending:
        """The same tensors, hashed as they are written."""

        def parts() -> Iterator[Tensor]:
            self._tensors.extend((entry.key, entry.size_bytes) for entry in pending.entries)
            for part in pending.parts():
                self._batch.append((part, pending))
                self._batch_bytes += part.nbytes
                if self._batch_bytes >= _BATCH_BYTES:
                    self._submit()
                yield part

        return Pending(pending.entries, parts)

    def _submit(self) -> None:
        """Hand over a batch; few may wait, so that memory stays small."""
        self._advance(self._batch_bytes)
        self._tasks.append(self._pool.submit(self._hash, self._batch))
        self._batch, self._batch_bytes = [], 0
        while len(self._tasks) > _WAITING:
            self._tasks.popleft().result()

    def _hash(self, batch: Sequence[tuple[Tensor, Pending]]) -> None:
        """Cut the bytes into tensors, and hash each."""
        for part, pending in batch:
            buffer, start = tensor_buffer(part), 0
            while start < len(buffer):
                key, size = self._tensors[0]
                stop = min(len(buffer), start + size - self._done)
                self._hasher.update(buffer[start:stop])
                self._done += stop - start
                start = stop
                if self._done == size:
                    self._stream.write(f"{self._hasher.hexdigest()}  {key}\n")
                    self._hasher, self._done = hashlib.sha256(), 0
                    self._tensors.popleft()
            # it was written before the next part was asked for, which alone reuses it
            if pending.recycle is not None:
                pending.recycle(part)


def read_digests(file: Path) -> dict[str, str]:
    """Key -> hex digest.

    Raises:
        AdapterError: naming the first line that is none.
    """
    found = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        digest, _, key = line.partition("  ")
        if len(digest) != 64 or not key:
            raise AdapterError(
                f"{file} line {number}: expected a SHA-256 and a name, found {line!r}"
            )
        found[key] = digest
    return found


def digest_of(parts: Iterator[Tensor]) -> str:
    """Hex SHA-256 of a tensor read part by part."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(tensor_buffer(part))
    return hasher.hexdigest()


def dtype_named(name: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by its name; None and "auto" keep each tensor's own.

    Raises:
        AdapterError: for a name that is none of a factor's.
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name != "auto" and name not in dtypes:
        raise AdapterError(f"dtype is {name!r}, expected auto, {', '.join(dtypes)}")
    return dtypes.get(name)
