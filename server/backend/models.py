"""The models a server serves: `{state}/models/{name}/{version}`, each loaded once."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.errors import BundleError, ManifestError
from edge_sdk.manifest import ModelManifest
from server.backend.ladder import LadderEngine
from server.errors import NotReadyError, UnknownModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model."""

    folder: Path
    manifest: ModelManifest
    engine: LadderEngine


class ModelStore:
    """Loads every model of a folder; the highest version of a name is the active one."""

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        self._folder = folder
        self._threads = threads
        self._models: dict[tuple[str, str], Model] = {}
        self._broken: dict[tuple[str, str], str] = {}
        self._loading = threading.Lock()

    def load(self) -> None:
        """Load what is on disk and not yet loaded; a broken model is reported, not fatal."""
        with self._loading:
            folders = {
                (path.parent.parent.name, path.parent.name): path.parent
                for path in sorted(self._folder.glob("*/*/model.json"))
                if not path.parent.name.startswith(".")  # an export that is still being written
            }
            for key in set(self._broken) - set(folders):
                del self._broken[key]
            for key, folder in folders.items():
                if key not in self._models:
                    self._load(key, folder)

    @property
    def ready(self) -> bool:
        """Whether there is a model to serve."""
        return bool(self._models)

    def all(self) -> list[Model]:
        """Every loaded model, by name and version."""
        return [self._models[key] for key in sorted(self._models, key=_by_version)]

    def broken(self) -> dict[tuple[str, str], str]:
        """Name and version of those that could not be loaded, and why."""
        return dict(self._broken)

    def get(self, name: str | None = None, version: str | None = None) -> Model:
        """A model: the active version unless named; the only model unless named.

        Raises: UnknownModelError naming those there are; NotReadyError while there is none.
        """
        if not self._models:
            raise NotReadyError("no model is loaded; publish one with `splitedge export`")
        found = [
            key
            for key in sorted(self._models, key=_by_version)
            if (name in (None, key[0])) and (version in (None, "", key[1]))
        ]
        if not found or (name is None and len({key[0] for key in found}) > 1):
            known = ", ".join(f"{n} version {v}" for n, v in sorted(self._models, key=_by_version))
            wanted = name or "of no name"
            wanted += f" version {version}" if version else ""
            raise UnknownModelError(f"model {wanted}: not served; there is {known}")
        return self._models[found[-1]]

    def _load(self, key: tuple[str, str], folder: Path) -> None:
        try:
            manifest = ModelManifest.load(folder)
            _check_place(key, manifest)
            engine = LadderEngine(folder, manifest, threads=self._threads)
        except BundleError as err:
            if self._broken.get(key) != str(err):  # it is tried again every turn, and said once
                logger.error("model=%s version=%s cannot be loaded: %s", *key, err)  # noqa: TRY400 - no traceback for a bad file
            self._broken[key] = str(err)
            return
        self._broken.pop(key, None)
        self._models[key] = Model(folder, manifest, engine)
        logger.info("model=%s version=%s loaded", *key)


def _check_place(key: tuple[str, str], manifest: ModelManifest) -> None:
    if key != (manifest.name, manifest.version):
        raise ManifestError(
            f"{'/'.join(key)}: holds {manifest.name} version {manifest.version};"
            " a model's folders are named after it"
        )


def _by_version(key: tuple[str, str]) -> tuple[str, int, str]:
    name, version = key
    return name, int(version) if version.isdigit() else -1, version
