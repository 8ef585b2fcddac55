"""Names that requests may ask for: the base, and adapters from folders inside one root."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from k3tune.errors import K3TuneError
from k3tune.files import shown
from k3tune.serve.adapters import AdaptedModel
from k3tune.serve.limits import Limits, Refused
from k3tune.serve.worker import Worker

_MOST_FILES = 10_000


class Registry:
    """The served names.

    Args:
        base: the base's.
        worker: holds the adapters.
        root: folder that adapters may be loaded from while the server runs; None allows none.
        limits: how many adapters may be loaded.
    """

    def __init__(self, base: str, worker: Worker, root: Path | None, limits: Limits) -> None:
        self.base = base
        self._worker, self._limits = worker, limits
        self._root = None if root is None else root.resolve()
        self._adapters: dict[str, tuple[str, Path]] = {}
        self._numbers = itertools.count(1)
        self._loading: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, Path]]:
        """Adapters' names and folders."""
        return iter([(name, folder) for name, (_, folder) in self._adapters.items()])

    def key_of(self, model: str | None) -> str | None:
        """The worker's key of a model's name; None for the base, which no name means, too.

        Raises:
            Refused: 404 if there is none of this name.
        """
        if model is None or model == self.base:
            return None
        if model not in self._adapters:
            raise Refused(404, f"The model {shown(model)} does not exist: see /v1/models")
        return self._adapters[model][0]

    async def load(self, name: str, path: str) -> None:
        """Load a folder inside the root under a new name.

        Raises:
            Refused: if the name is taken, the path is not allowed, or the adapter does not fit.
        """
        folder = self._inside_root(path)
        taken = {self.base, *self._adapters, *self._loading}
        if name in taken:
            raise Refused(
                400,
                f"The lora adapter {shown(name)} has already been loaded: give every version a "
                "name of its own",
            )
        num_adapters = len(self._adapters) + len(self._loading)
        if num_adapters >= self._limits.max_adapters:
            raise Refused(
                400,
                f"{num_adapters} adapters are loaded, expected at most "
                f"{self._limits.max_adapters}: unload one, or start the server with a higher "
                "--max-adapters",
            )
        key = f"adapter_{next(self._numbers)}"
        self._loading.add(name)
        try:
            await self._worker.load(key, folder)
        except K3TuneError as error:
            raise Refused(400, str(error)) from error
        finally:
            self._loading.discard(name)
        self._adapters[name] = (key, folder)

    def preload(self, name: str, folder: Path, model: AdaptedModel) -> None:
        """Load any folder before the worker runs.

        Args:
            name: not yet taken.
            folder: of the adapter.
            model: the worker's.

        Raises:
            AdapterError, CheckpointError: if the adapter is not usable.
        """
        assert name not in (self.base, *self._adapters), f"{name=}"
        key = f"adapter_{next(self._numbers)}"
        model.load(key, folder)
        self._adapters[name] = (key, folder)

    def unload(self, name: str) -> None:
        """Forget a name; what it is used for at this moment goes on to its end.

        Raises:
            Refused: 404 if there is none.
        """
        if name not in self._adapters:
            raise Refused(404, f"The lora adapter {shown(name)} cannot be found.")
        key, _ = self._adapters.pop(name)
        self._worker.retire(key)

    def _inside_root(self, path: str) -> Path:
        """A folder below the root that no link leads out of.

        What lies outside is answered alike whether it is there or not.
        """
        if self._root is None:
            raise Refused(
                403, "adapters cannot be loaded: start the server with --adapter-root FOLDER"
            )
        outside = Refused(403, "lora_path leads out of the folder adapters may be loaded from")
        try:
            folder = (self._root / path).resolve()
            if not folder.is_relative_to(self._root):
                raise outside
            if not folder.is_dir():
                raise Refused(404, f"lora_path {shown(path)} is no folder")
            for number, file in enumerate(folder.rglob("*")):
                if number >= _MOST_FILES:
                    raise Refused(400, f"lora_path {shown(path)} holds too many files")
                if not file.resolve().is_relative_to(self._root):
                    raise outside
        # a loop of links, a name that is too long
        except (OSError, RuntimeError, ValueError) as error:
            raise Refused(400, f"lora_path {shown(path)} cannot be read") from error
        return folder
