"""Models on their way from the disk to devices: loaded, signed, noted in the registry, active."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_sdk.errors import BundleError
from server.backend.models import Files, ModelStore, ServedModel, files_of
from server.errors import BadRequestError, NotReadyError, UnknownModelError
from server.registry.artifacts import ArtifactRepository
from server.registry.database import Registry

logger = logging.getLogger(__name__)

Version = tuple[str, int]


class ModelPublisher:
    """Signs and publishes the bundles of every model in the store.

    If that fails, the model is still served to clients that name its version, and to all clients if
    there is no other model. It is tried again when its files change.

    Args:
        published: called after each model that devices can fetch from then on.
    """

    def __init__(
        self,
        models: ModelStore,
        artifacts: ArtifactRepository,
        registry: Registry,
        published: Callable[[], None],
    ) -> None:
        self._models = models
        self._artifacts = artifacts
        self._catalogue = registry.catalogue
        self._told = published
        self._published: set[Version] = set()
        self._failed: dict[Version, tuple[str, Files]] = {}  # why, and the files then

    def refresh(self, *, again: bool = False) -> None:
        """Load and sign the models on disk that are new.

        Args:
            again: also try models that failed before, with the same files.
        """
        self._models.load(again=again)
        self._follow_active()
        loaded = {_version(model): model for model in self._models.all()}
        self._published &= set(loaded)
        for version, model in loaded.items():
            if version not in self._published:
                self._publish(version, model, again=again)

    def active(self) -> ServedModel | None:
        """The active version of the name published last, among those that devices can fetch."""
        active = [record for record in self._catalogue.versions() if record.active]
        for record in sorted(active, key=lambda record: record.published_at, reverse=True):
            try:
                model = self._models.get(record.name)
            except (NotReadyError, UnknownModelError):
                continue
            if _version(model) in self._published:
                return model
        return None

    def _publish(self, version: Version, model: ServedModel, *, again: bool) -> None:
        reason, failed = self._failed.get(version, ("", None))
        files = files_of(model.folder)
        if files == failed and not again:
            return
        try:
            self._artifacts.publish_bundles(model.folder)
            if version not in {(known.name, known.version) for known in self._catalogue.versions()}:
                self._catalogue.publish(*version)
                self._catalogue.activate(*version)
        except (BundleError, BadRequestError) as err:
            if reason != str(err):
                logger.error("model=%s version=%d bundles are not published: %s", *version, err)  # noqa: TRY400 - no traceback for a bad file
            self._failed[version] = str(err), files
            return
        self._failed.pop(version, None)
        self._published.add(version)
        self._follow_active()
        self._told()

    def _follow_active(self) -> None:
        """Make the store serve the versions that the registry notes as active."""
        active = {
            record.name: record.version for record in self._catalogue.versions() if record.active
        }
        self._models.activate({name: str(version) for name, version in active.items()})


def _version(model: ServedModel) -> Version:
    return model.manifest.name, int(model.manifest.version)
