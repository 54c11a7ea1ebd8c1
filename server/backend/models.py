"""The models a server serves: `{state}/models/{name}/{version}`, each loaded once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.errors import BundleError, ManifestError
from edge_sdk.manifest import ModelManifest
from server.backend.ladder import LadderEngine
from server.errors import NotReadyError, UnknownModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model of one version."""

    folder: Path
    manifest: ModelManifest
    engine: LadderEngine


# The files of a model's folder: name, time of change and size of each.
Files = tuple[tuple[str, int, int], ...]


class ModelStore:
    """Loads every model of a folder.

    `activate` says which version of a name is active; otherwise the highest version is. A version
    is no longer served once its folder is deleted, and loaded again if its folder is replaced.

    Args:
        check: called with the folder and the manifest of a model before it is loaded; a BundleError
            refuses the model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 1,
        check: Callable[[Path, ModelManifest], None] | None = None,
    ) -> None:
        self._folder = folder
        self._threads = threads
        self._check = check
        self._models: dict[tuple[str, str], ServedModel] = {}
        self._broken: dict[tuple[str, str], str] = {}
        self._tried: dict[tuple[str, str], Files] = {}
        self._stamps: dict[tuple[str, str], tuple[int, int]] = {}
        self._active: dict[str, str] = {}
        self._loading = threading.Lock()

    def load(self, *, again: bool = False) -> None:
        """Bring the store in line with the disk; a broken model is logged, and stops nothing.

        Args:
            again: also try broken models with unchanged files.
        """
        with self._loading:
            folders = {
                (path.parent.parent.name, path.parent.name): path.parent
                for path in sorted(self._folder.glob("*/*/model.json"))
                if not path.parent.name.startswith(".")  # an export that is still being written
            }
            # each change replaces the whole table, because queries look models up meanwhile
            stamps = {key: _stamp(folder) for key, folder in folders.items()}
            for key in list(self._models):
                if stamps.get(key) != self._stamps[key]:
                    self._models = {k: model for k, model in self._models.items() if k != key}
                    what = "was replaced" if key in folders else "is gone"
                    logger.info("model=%s version=%s %s", *key, what)
            self._broken = {key: why for key, why in self._broken.items() if key in folders}
            for key, folder in folders.items():
                if key not in self._models:
                    self._try(key, folder, again=again)

    def activate(self, active: Mapping[str, str]) -> None:
        """Set the active version of each name; of names not given it is the highest."""
        self._active = dict(active)

    @property
    def ready(self) -> bool:
        """Whether there is a model to serve."""
        return bool(self._models)

    def all(self) -> list[ServedModel]:
        """Every loaded model, by name and version."""
        models = self._models
        return [models[key] for key in sorted(models, key=_by_version)]

    def broken(self) -> dict[tuple[str, str], str]:
        """Name and version of models that could not be loaded, with the reason."""
        return dict(self._broken)

    def get(self, name: str | None = None, version: str | None = None) -> ServedModel:
        """A model: by default the only one, in its active version.

        Raises: UnknownModelError naming the existing ones; NotReadyError while there is none.
        """
        models = self._models
        if not models:
            raise NotReadyError("no model is loaded; publish one with `splitedge export`")
        found = [
            key
            for key in sorted(models, key=_by_version)
            if (name in (None, key[0])) and (version in (None, "", key[1]))
        ]
        if not found or (name is None and len({key[0] for key in found}) > 1):
            known = ", ".join(f"{n} version {v}" for n, v in sorted(models, key=_by_version))
            wanted = name or "of no name"
            wanted += f" version {version}" if version else ""
            raise UnknownModelError(f"model {wanted}: not served; available: {known}")
        highest = found[-1]
        active = highest[0], self._active.get(highest[0], "")
        return models[active if active in found else highest]

    def _try(self, key: tuple[str, str], folder: Path, *, again: bool) -> None:
        """Load a model, unless it is known to be broken and its files have not changed."""
        files = files_of(folder)  # before it is read, so that the next turn sees later changes
        self._stamps[key] = _stamp(folder)
        if key in self._broken and self._tried.get(key) == files and not again:
            return
        self._tried[key] = files
        self._load(key, folder)

    def _load(self, key: tuple[str, str], folder: Path) -> None:
        try:
            manifest = ModelManifest.load(folder)
            _check_place(key, manifest)
            if self._check is not None:
                self._check(folder, manifest)
            engine = LadderEngine(folder, manifest, threads=self._threads)
        except BundleError as err:
            if self._broken.get(key) != str(err):  # logged once, however often it is tried
                logger.error("model=%s version=%s cannot be loaded: %s", *key, err)  # noqa: TRY400 - no traceback for a bad file
            self._broken[key] = str(err)
            return
        self._broken.pop(key, None)
        self._models = {**self._models, key: ServedModel(folder, manifest, engine)}
        logger.info("model=%s version=%s loaded", *key)


def _stamp(folder: Path) -> tuple[int, int]:
    """Inode and time of change of the manifest: others, once the folder is replaced."""
    try:
        status = (folder / "model.json").stat()
    except OSError:  # deleted meanwhile
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def files_of(folder: Path) -> Files:
    """The files in a model's folder now; equal values mean that no file has changed."""
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            status = path.stat()
            found.append((str(path.relative_to(folder)), status.st_mtime_ns, status.st_size))
    return tuple(found)


def _check_place(key: tuple[str, str], manifest: ModelManifest) -> None:
    if key != (manifest.name, manifest.version):
        raise ManifestError(
            f"{'/'.join(key)}: expected the model of that name and version, got {manifest.name}"
            f" version {manifest.version}; rename the folders"
        )


def _by_version(key: tuple[str, str]) -> tuple[str, int, str]:
    name, version = key
    return name, int(version) if version.isdigit() else -1, version
