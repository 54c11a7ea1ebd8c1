"""The models a server serves: `{state}/models/{name}/{version}`, each loaded once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edge_sdk.errors import BundleError, ManifestError
from edge_sdk.manifest import ModelManifest
from edge_sdk.providers.names import CPU
from server.backend.ladder import LadderEngine
from server.errors import NotReadyError, UnknownModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of one version on the disk, read and checked; devices can be given its bundles."""

    folder: Path
    manifest: ModelManifest


@dataclass(frozen=True, slots=True)
class ServedModel(StoredModel):
    """A model that is in memory too, and answers queries."""

    engine: LadderEngine


Stored = TypeVar("Stored", bound=StoredModel)


# Refuses a model by a BundleError, by its folder and manifest.
Check = Callable[[Path, ModelManifest], None]

# The files of a model's folder: name, time of change and size of each.
Files = tuple[tuple[str, int, int], ...]


class ModelStore:
    """Loads every model of a folder.

    `activate` says which version of a name is active; otherwise the highest version is. A version
    is no longer served once its folder is deleted, and loaded again if its folder is replaced.
    `unload` takes a name out of memory until `load_name`.

    Args:
        check: called with the folder and the manifest of a model before it is loaded; a BundleError
            refuses the model.
        provider: runs the segments.
        or_cpu: whether the CPU does where the provider does not start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 1,
        check: Check | None = None,
        provider: str = CPU,
        or_cpu: bool = False,
    ) -> None:
        self._folder = folder
        self._threads = threads
        self._provider = provider
        self._or_cpu = or_cpu
        self._check = check
        self._models: dict[tuple[str, str], StoredModel] = {}
        self._unloaded: frozenset[str] = frozenset()
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
                for path in manifests_in(self._folder)
            }
            # each change replaces the whole table, because queries look models up meanwhile
            stamps = {key: _stamp(folder) for key, folder in folders.items()}
            for key in list(self._models):
                if stamps.get(key) != self._stamps[key]:
                    self._models = {k: model for k, model in self._models.items() if k != key}
                    what = "was replaced" if key in folders else "is gone"
                    logger.info("model=%s version=%s %s", *key, what)
            self._broken = {key: why for key, why in self._broken.items() if key in folders}
            self._unloaded &= {name for name, _ in folders}
            for key, folder in folders.items():
                if key not in self._models:
                    self._try(key, folder, again=again)

    def activate(self, active: Mapping[str, str]) -> None:
        """Set the active version of each name; of names not given it is the highest."""
        self._active = dict(active)

    def load_name(self, name: str) -> None:
        """Read all versions of a name from the disk again, and serve them.

        Raises: UnknownModelError if there is none; BundleError if one of them cannot be served.
        """
        with self._loading:
            keys = [key for key in self._models if key[0] == name]
            keys += [key for key in self._broken if key[0] == name]
            if not keys:
                raise self._unknown(name, None, self._models)
            for key in keys:  # queries are refused until all are there
                self._load(key, self._folder / key[0] / key[1], served=True)
            self._unloaded -= {name}
            broken = [self._broken[key] for key in keys if key in self._broken]
        if broken:
            raise BundleError("; ".join(broken))

    def unload(self, name: str) -> None:
        """Take all versions of a name out of memory; queries for them are refused.

        What devices run and are given does not change.

        Raises: UnknownModelError if there is none.
        """
        with self._loading:
            if not any(key[0] == name for key in self._models):
                raise self._unknown(name, None, self._models)
            self._unloaded |= {name}
            self._models = {
                key: StoredModel(model.folder, model.manifest) if key[0] == name else model
                for key, model in self._models.items()
            }
        logger.info("model=%s unloaded", name)

    @property
    def ready(self) -> bool:
        """Whether there is a model to serve."""
        return any(isinstance(model, ServedModel) for model in self._models.values())

    def all(self) -> list[StoredModel]:
        """Every model, served or unloaded, by name and version."""
        models = self._models
        return [models[key] for key in sorted(models, key=_by_version)]

    def broken(self) -> dict[tuple[str, str], str]:
        """Name and version of models that could not be loaded, with the reason."""
        return dict(self._broken)

    def get(self, name: str | None = None, version: str | None = None) -> StoredModel:
        """A model, served or unloaded: by default the only one, in its active version.

        Raises: UnknownModelError naming the existing ones; NotReadyError while there is none.
        """
        return self._choose(self._models, name, version)

    def served(self, name: str | None = None, version: str | None = None) -> ServedModel:
        """A model that answers queries: by default the only one, in its active version.

        Raises: UnknownModelError naming those that do; NotReadyError while there is none.
        """
        # another thread may load or unload a name between any two of these lines
        unloaded, models = self._unloaded, self._models
        served = {key: one for key, one in models.items() if isinstance(one, ServedModel)}
        if name in unloaded or (models and not served):
            raise self._unknown(name, version, served)
        return self._choose(served, name, version)

    def _choose(
        self, models: Mapping[tuple[str, str], Stored], name: str | None, version: str | None
    ) -> Stored:
        if not models:
            raise NotReadyError("no model is loaded; publish one with `splitedge export`")
        found = [
            key
            for key in sorted(models, key=_by_version)
            if (name in (None, key[0])) and (version in (None, "", key[1]))
        ]
        if not found or (name is None and len({key[0] for key in found}) > 1):
            raise self._unknown(name, version, models)
        highest = found[-1]
        active = highest[0], self._active.get(highest[0], "")
        return models[active if active in found else highest]

    def _unknown(
        self, name: str | None, version: str | None, models: Mapping[tuple[str, str], StoredModel]
    ) -> UnknownModelError:
        wanted = name or "of no name"
        wanted += f" version {version}" if version else ""
        if name in self._unloaded:
            return UnknownModelError(
                f"model {wanted}: unloaded by the operator, until POST"
                f" /v2/repository/models/{name}/load"
            )
        # who misses a version may be one that is not to know of other models
        alike = [key for key in models if key[0] == name] or list(models)
        known = ", ".join(f"{n} version {v}" for n, v in sorted(alike, key=_by_version))
        return UnknownModelError(f"model {wanted}: not served; available: {known or 'none'}")

    def _try(self, key: tuple[str, str], folder: Path, *, again: bool) -> None:
        """Load a model, unless it is known to be broken and its files have not changed."""
        files = files_of(folder)  # before it is read, so that the next turn sees later changes
        self._stamps[key] = _stamp(folder)
        if key in self._broken and self._tried.get(key) == files and not again:
            return
        self._tried[key] = files
        self._load(key, folder, served=key[0] not in self._unloaded)

    def _load(self, key: tuple[str, str], folder: Path, *, served: bool) -> None:
        try:
            model = read_model(folder, check=self._check)
            if served:
                model = self._served(model)
        except BundleError as err:
            if self._broken.get(key) != str(err):  # logged once, however often it is tried
                logger.error("model=%s version=%s cannot be loaded: %s", *key, err)  # noqa: TRY400 - no traceback for a bad file
            self._broken[key] = str(err)
            self._models = {k: model for k, model in self._models.items() if k != key}
            return
        self._broken.pop(key, None)
        self._models = {**self._models, key: model}
        how = f"loaded, by {self._provider}" if served else "read"
        logger.info("model=%s version=%s %s", *key, how)

    def _served(self, model: StoredModel) -> ServedModel:
        """A model with its graphs loaded, by the CPU if the provider does not start and it may.

        Raises: BundleError if it cannot be served.
        """
        try:
            return serve_model(model, threads=self._threads, provider=self._provider)
        except BundleError as err:
            if not self._or_cpu or self._provider == CPU:
                raise
            served = serve_model(model, threads=self._threads)  # raises if the model is at fault
            logger.warning("%s is not used, the CPU is: %s", self._provider, err)
            self._provider = CPU
            return served


def manifests_in(models: Path) -> list[Path]:
    """The manifests of all models in a folder, without exports that are still being written."""
    found = sorted(models.glob("*/*/model.json"))
    return [path for path in found if not path.parent.name.startswith(".")]


def read_model(folder: Path, *, check: Check | None = None) -> StoredModel:
    """Read and check the model in `{name}/{version}`, without its graphs.

    Raises: BundleError if it cannot be published.
    """
    manifest = ModelManifest.load(folder)
    _check_place((folder.parent.name, folder.name), manifest)
    if check is not None:
        check(folder, manifest)
    return StoredModel(folder, manifest)


def serve_model(model: StoredModel, *, threads: int = 1, provider: str = CPU) -> ServedModel:
    """Load the graphs of a model.

    Raises: BundleError if it cannot be served.
    """
    engine = LadderEngine(model.folder, model.manifest, threads=threads, provider=provider)
    return ServedModel(model.folder, model.manifest, engine)


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
