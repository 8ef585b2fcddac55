"""Prove that what was exported is what was trained, or name what is wrong."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3tune.errors import AdapterError, CheckpointError, K3TuneError
from k3tune.lora.export import faults
from k3tune.lora.export.base_record import sample_digest
from k3tune.lora.export.comparison import compare_adapters, dropped_modules
from k3tune.lora.export.factors import AdapterSource, adapter_folder, read_source
from k3tune.lora.export.faults import Fault, FaultList
from k3tune.lora.export.served import ServedAdapter, read_as
from k3tune.lora.export.structure import check_structure, recorded_modules
from k3tune.lora.modules import ModuleShape, module_shapes
from k3tune.lora.read import AdapterFiles, FactorReader, read_adapter
from k3tune.published.architecture import parse_config, read_config
from k3tune.published.hub import resolve_checkpoint

if TYPE_CHECKING:
    from k3tune.model.modeling import K3ForCausalLM

_CHUNK_BYTES = 16 << 20
_EXACT_GAP, _ROUNDED_GAP = 1e-3, 5e-2


@dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        faults: everything wrong; empty means the proof holds as far as ``checks`` go.
        checks: what was checked, in sentences.
        skipped: what was not, and why.
        figures: measured numbers by name.
    """

    faults: list[Fault]
    checks: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "ok": self.ok,
                "faults": [vars(fault) for fault in self.faults],
                "checks": self.checks,
                "skipped": self.skipped,
                "figures": self.figures,
            },
            indent=2,
        )


def verify(
    adapter: str | Path,
    base: str | Path,
    *,
    against: str | Path | None = None,
    base_unchanged: str | Path | None = None,
    expect_version: int | None = None,
    dtype: str = "auto",
    kernels: str = "auto",
) -> Verification:
    """Check an adapter directory against its base and, if given, the adapter it was trained as.

    First the structure: every key has its module, nothing is missing or left over, shapes, dtypes,
    values, hashes. Then every factor as the engine it was written for reads it (by a reader of its
    own), against the trained one. Then the model's answers with both.

    Args:
        adapter: directory.
        base: checkpoint folder or hub id.
        against: adapter directory or training checkpoint it was exported from.
        base_unchanged: file of SHA-256 and name a line, as ``sha256sum`` writes them in the base's
            folder.
        expect_version: version the adapter must have.
        dtype, kernels: of the model that answers, as in :func:`k3tune.load_base`; ``"auto"`` is
            float32 on a CPU and bfloat16 on a GPU.

    Raises:
        K3TuneError: if base, ``against`` or the hash file is not usable; what is wrong with the
            adapter itself is a fault.
    """
    folder = resolve_checkpoint(base, weights=True)
    shapes = module_shapes(parse_config(read_config(folder)))
    run = _Run(Path(adapter), folder, shapes)
    if base_unchanged is not None:
        run.check_base_files(Path(base_unchanged))
    files = run.read_files()
    if files is not None:
        run.check_version(files, expect_version)
        if run.check_base(files):
            with FactorReader() as reader:
                run.check_factors(files, against, reader, dtype, kernels)
    return Verification(run.found.faults, run.checks, run.skipped, run.figures)


class _Run:
    """A verification under way."""

    def __init__(self, adapter: Path, base: Path, shapes: Mapping[str, ModuleShape]) -> None:
        self.adapter, self.base, self.shapes = adapter_folder(adapter), base, shapes
        self.found = FaultList()
        self.checks: list[str] = []
        self.skipped: list[str] = []
        self.figures: dict[str, float] = {}

    def check_base_files(self, hash_file: Path) -> None:
        """Hash the base's files and compare."""
        count = 0
        for name, digest in _hash_lines(hash_file).items():
            file = self.base / name
            if not file.is_file():
                self.found.add(faults.BASE_CHANGED, name, "the file is gone")
            elif _sha256(file) != digest:
                self.found.add(faults.BASE_CHANGED, name, f"not the SHA-256 in {hash_file}")
            count += 1
        self.checks.append(f"{count} files of the base hashed and compared with {hash_file}")

    def read_files(self) -> AdapterFiles | None:
        """Config and headers; None if they cannot be read."""
        try:
            return read_adapter(self.adapter)
        except CheckpointError as error:
            name = faults.FILE_TRUNCATED if "truncated" in str(error) else faults.FILE_DAMAGED
            self.found.add(name, str(self.adapter), str(error))
        except AdapterError as error:
            self.found.add(faults.NOT_USABLE, str(self.adapter), str(error))
        return None

    def check_version(self, files: AdapterFiles, expected: int | None) -> None:
        """Compare the version, where one is expected."""
        if expected is None:
            return
        version = (files.metadata or {}).get("version")
        if version != expected:
            where = str(self.adapter)
            self.found.add(faults.STALE_VERSION, where, f"expected {expected}, found {version}")
        self.checks.append("version")

    def check_base(self, files: AdapterFiles) -> bool:
        """Whether the rest makes sense against this base."""
        recorded = (files.metadata or {}).get("base") or {}
        sample = recorded.get("sample")
        if sample is None:
            if not recorded.get("fingerprint"):
                self.skipped.append("the base: the adapter remembers no fingerprint of it")
            return True
        actual = sample_digest(self.base)
        if actual != sample:
            self.found.add(
                faults.WRONG_BASE,
                str(self.base),
                f"expected a base of {sample}, found {actual or 'no readable weights'}",
            )
            return False
        self.checks.append("the base is the one remembered (sample of its tensors)")
        return True

    def check_factors(
        self,
        files: AdapterFiles,
        against: str | Path | None,
        reader: FactorReader,
        dtype: str,
        kernels: str,
    ) -> None:
        """Structure, values, and the forward pass."""
        metadata = files.metadata or {}
        export = metadata.get("export") or {}
        trained = None
        if against is not None:
            trained = read_source(read_adapter(adapter_folder(against)), self.base, reader)
        expected = recorded_modules(metadata)
        if trained is not None:
            dropped = dropped_modules(export)
            zeros = [name for name in expected if name not in trained.modules]
            expected = [name for name in trained.modules if name not in dropped] + zeros
        check_structure(files, self.shapes, expected, metadata.get("version"), reader, self.found)
        self.checks.append(f"names, shapes and values of {len(files.tensors)} tensors")
        broken = self.found.names() - {faults.STALE_VERSION, faults.BASE_CHANGED}
        # a changed tensor still has values, and they tell what happened to it
        if broken - {faults.TENSOR_CHANGED, faults.LAYER_MISSING, faults.ALL_ZERO}:
            self.skipped.append("factors and forward pass: the structure is not sound")
            return
        served = self._served(export.get("format"))
        if trained is None:
            self.skipped.append("factors against the trained ones: no --against")
            for reason in served.refused:
                self.found.add(faults.REFUSED, reason.partition(":")[0], reason)
            for key, reason in served.lost.items():
                self.found.add(faults.LOST, key, reason)
        else:
            self.figures["largest_factor_distance"] = compare_adapters(served, trained, self.found)
            reads = export.get("format") or "k3tune"
            self.checks.append(
                f"factors of {len(served.modules)} modules, as {reads} reads them, against the "
                "trained ones"
            )
        self._check_forward(files, served, trained, dtype, kernels)

    def _served(self, consumer: str | None) -> ServedAdapter:
        experts = max((s.num_experts or 0 for s in self.shapes.values()), default=0)
        return read_as(consumer, self.adapter, experts)

    def _check_forward(
        self,
        files: AdapterFiles,
        served: ServedAdapter,
        trained: AdapterSource | None,
        dtype: str,
        kernels: str,
    ) -> None:
        from k3tune.lora.export.probe import compare_forward
        from k3tune.lora.read import stored_dtype

        model = self._load(files, dtype, kernels)
        if not self._check_fingerprint(files, model) or trained is None or served.refused:
            return
        export = (files.metadata or {}).get("export") or {}
        figures = compare_forward(model, served, trained.files.folder, dropped_modules(export))
        self.figures["forward_effect"], self.figures["forward_gap"] = figures
        # a factor rounded on the way, or a model that rounds, moves the answer by no more
        written, kept = (
            min(stored_dtype(stored).itemsize for stored in tensors.values())
            for tensors in (files.tensors, trained.files.tensors)
        )
        rounded = written < kept or model.model.embed_tokens.weight.dtype.itemsize < 4
        bound = _ROUNDED_GAP if rounded else _EXACT_GAP
        if not figures.gap <= bound:
            self.found.add(
                faults.FORWARD_DIFFERS,
                "probe tokens",
                f"the exported adapter's logits are off by {figures.gap:.3g} of what the trained "
                f"one changes, expected at most {bound:g}",
            )
        self.checks.append(
            f"forward pass on probe tokens in {model.model.embed_tokens.weight.dtype}: gap "
            f"{figures.gap:.2e} of the adapter's effect"
        )

    def _load(self, files: AdapterFiles, dtype: str, kernels: str) -> "K3ForCausalLM":
        import torch

        from k3tune.model import load_base

        device = "cuda" if torch.cuda.is_available() else "cpu"
        recorded = (files.metadata or {}).get("base") or {}
        if dtype == "auto":
            known = recorded.get("dtype") if self._needs_fingerprint(recorded) else None
            dtype = known or ("bfloat16" if device == "cuda" else "float32")
        return load_base(self.base, dtype=getattr(torch, dtype), device=device, kernels=kernels)

    def _needs_fingerprint(self, recorded: Mapping[str, Any]) -> bool:
        return bool(recorded.get("fingerprint")) and not recorded.get("sample")

    def _check_fingerprint(self, files: AdapterFiles, model: "K3ForCausalLM") -> bool:
        recorded = (files.metadata or {}).get("base") or {}
        if not self._needs_fingerprint(recorded):
            return True
        from k3tune.lora.fingerprint import base_fingerprint

        dtype = str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")
        if dtype != recorded.get("dtype"):
            self.skipped.append(
                f"the base's fingerprint: it is of {recorded.get('dtype')}, loaded was {dtype}"
            )
            return True
        actual = base_fingerprint(model)
        if actual != recorded["fingerprint"]:
            self.found.add(
                faults.WRONG_BASE,
                str(self.base),
                f"expected a base of {recorded['fingerprint']}, found {actual}",
            )
            return False
        self.checks.append("the base is the one trained on (fingerprint of all its parameters)")
        return True


def _hash_lines(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise K3TuneError(f"cannot read {file}: {error}") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        digest, _, name = line.partition(" ")
        name = name.lstrip(" *")
        if len(digest) != 64 or not name:
            raise K3TuneError(
                f"{file} line {number} is {line!r}, expected a SHA-256 and a file name: make it "
                "with sha256sum in the base's folder"
            )
        found[name] = digest.lower()
    if not found:
        raise K3TuneError(f"{file} names no file, expected the output of sha256sum")
    return found


def _sha256(file: Path) -> str:
    hasher = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()
