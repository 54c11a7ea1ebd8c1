"""Models on their way from the disk to devices: loaded, signed, noted in the registry, active."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from edge_sdk.errors import BundleError, StorageError
from edge_sdk.manifest import ModelManifest
from server.backend.models import Files, ModelStore, StoredModel, files_of
from server.errors import (
    BadRequestError,
    ClockError,
    ConflictError,
    NotReadyError,
    RegistryError,
    UnknownModelError,
    gist,
)
from server.registry.catalogue import ModelCatalogue
from server.registry.records import ModelVersion
from server.signing.artifacts import ArtifactRepository

logger = logging.getLogger(__name__)

Version = tuple[str, int]

# folders of an export that its digest is over, beside model.json
_DIGESTED: Final = ("segments", "bundles")


class ModelPublisher:
    """Signs and publishes the bundles of every model in the store.

    If that fails, the model is still served to clients that name its version, and to all clients if
    there is no other model. It is tried again when its files change.

    Args:
        hold: whether a new version waits for a roll-out, or for `models activate`.
    """

    def __init__(
        self,
        models: ModelStore,
        artifacts: ArtifactRepository,
        catalogue: ModelCatalogue,
        *,
        hold: bool = False,
    ) -> None:
        self._models = models
        self._artifacts = artifacts
        self._catalogue = catalogue
        self._hold = hold
        self._published: set[Version] = set()
        self._failed: dict[Version, tuple[str, Files]] = {}  # why, and the files then

    def refresh(self, *, again: bool = False) -> None:
        """Load and sign the models on disk that are new.

        Args:
            again: also try models that failed before, with the same files.
        """
        self._models.load(again=again)
        follow_active(self._models, self._catalogue)
        loaded = {_version(model): model for model in self._models.all()}
        self._published &= set(loaded)
        new = [version for version in loaded if version not in self._published]
        # which name came first is asked later: of several names, the one exported first goes first
        first: dict[str, float] = {}
        for name, _ in new:
            times = [_exported_at(loaded[one]) for one in new if one[0] == name]
            first[name] = min(times)
        for version in sorted(new, key=lambda one: (first[one[0]], *one)):
            self._publish(version, loaded[version], again=again)

    def folders(self) -> list[Path]:
        """The folders of the models whose bundles are published."""
        return [one.folder for one in self._models.all() if _version(one) in self._published]

    def wanted(self, fleet: str) -> StoredModel | None:
        """The model that devices of `fleet` should run, as far as it can be fetched; else None."""
        wanted = self._catalogue.wanted(fleet)
        if wanted.model is None:
            return None
        # a version whose files are gone gives way to another one of its name, unless it is pinned
        for version in (str(wanted.version), None):
            try:
                model = self._models.get(wanted.model, version)
            except (NotReadyError, UnknownModelError):
                continue
            if _version(model) in self._published and (version or not wanted.pinned):
                return model
        return None

    def published(self, name: str, version: str) -> StoredModel | None:
        """Version of a model by name, if devices can fetch its bundles; else None."""
        try:
            model = self._models.get(name, version)
        except (NotReadyError, UnknownModelError):
            return None
        return model if _version(model) in self._published else None

    def _publish(self, version: Version, model: StoredModel, *, again: bool) -> None:
        reason, failed = self._failed.get(version, ("", None))
        files = files_of(model.folder)
        if files == failed and not again:
            return
        try:
            digest = digest_of(model.folder)
            self._catalogue.check_free(*version, digest)
            self._artifacts.publish_bundles(model.folder)
            published = self._catalogue.publish(*version, digest, hold=self._hold)
        except (
            *(BundleError, BadRequestError, ClockError, ConflictError),
            *(RegistryError, StorageError),  # a full disk: it is tried again
        ) as err:
            if reason != gist(err):
                logger.error("model=%s version=%d bundles are not published: %s", *version, err)  # noqa: TRY400 - no traceback for a bad file
            self._failed[version] = gist(err), files
            return
        self._failed.pop(version, None)
        self._published.add(version)
        if self._hold and self._waits(published):
            logger.info(
                "model=%s version=%d waits: `splitedge server rollout start %s %d` brings it to the"
                " devices, `splitedge server models activate %s/%d` to all at once",
                *(3 * version),
            )
        follow_active(self._models, self._catalogue)

    def _waits(self, published: ModelVersion) -> bool:
        """Whether a version is newer than the active one of its name."""
        of_name = [one for one in self._catalogue.versions() if one.name == published.name]
        return any(one.active and one.version < published.version for one in of_name)


def follow_active(models: ModelStore, catalogue: ModelCatalogue) -> None:
    """Make a store serve the versions that the catalogue notes as active."""
    active = {one.name: one.version for one in catalogue.versions() if one.active}
    models.activate({name: str(version) for name, version in active.items()})


def refuse_used_number(catalogue: ModelCatalogue, folder: Path, manifest: ModelManifest) -> None:
    """Refuse a model whose number was used for other files, or was removed.

    Devices may still run the model that had the number first, and this one would answer their
    offloads wrongly.

    Raises: BundleError.
    """
    if not manifest.version.isdecimal():
        return  # it is served by name, and cannot be published
    try:
        catalogue.check_free(manifest.name, int(manifest.version), digest_of(folder))
    except ConflictError as err:
        raise BundleError(str(err)) from err


def digest_of(folder: Path) -> str:
    """SHA-256 in hex over the names and contents of an export's files.

    Raises: BundleError if a file cannot be read.
    """
    hashes = {}
    paths = [folder / "model.json"]
    for part in _DIGESTED:
        paths += [path for path in (folder / part).rglob("*") if path.is_file()]
    for path in paths:
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as err:
            raise BundleError(f"{path}: cannot be read ({err.strerror})") from err
        hashes[path.relative_to(folder).as_posix()] = content
    return digest_of_hashes(hashes)


def digest_of_hashes(hashes: Mapping[str, str]) -> str:
    """The digest of an export by the SHA-256 of its files, in hex, by their names in its folder."""
    digest = hashlib.sha256()
    for part in ("model.json", *_DIGESTED):
        names = [name for name in hashes if PurePosixPath(name).parts[0] == part]
        for name in sorted(names, key=PurePosixPath):
            digest.update(f"{name} {hashes[name]}\n".encode())
    return digest.hexdigest()


def _version(model: StoredModel) -> Version:
    return model.manifest.name, int(model.manifest.version)


def _exported_at(model: StoredModel) -> float:
    try:
        return (model.folder / "model.json").stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0
