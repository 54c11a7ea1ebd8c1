"""Removal of published versions: out of the registry first, then the bundles, then the files.

A kill in between leaves files that no device is assigned any more; removing the version again
deletes them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from edge_sdk.errors import BundleError, StorageError
from exporters.versions import removed_place
from server.deployment.calls import version_of
from server.deployment.publisher import digest_of
from server.errors import ConflictError, UnknownModelError
from server.registry.database import Registry
from server.registry.records import ModelVersion
from server.signing.artifacts import ArtifactRepository


class ModelRemoval:
    """Removes versions of one server's models, whether the server runs or not.

    Args:
        models: folder of the exported models, `{models}/{name}/{version}`.
    """

    def __init__(self, registry: Registry, artifacts: ArtifactRepository, models: Path) -> None:
        self._registry = registry
        self._artifacts = artifacts
        self._models = models

    def remove(
        self, name: str, version: int | None = None, *, force: bool = False
    ) -> tuple[ModelVersion, ...]:
        """Remove a version, or all versions of a name, with their files.

        Args:
            force: also remove what devices report to be running: the server answers their offloads
                no more, until they have moved.
        Returns: what was removed.
        Raises: ConflictError naming the devices that run it or are pinned to it, or as
            `ModelCatalogue.remove`; UnknownModelError; StorageError.
        """
        catalogue = self._registry.catalogue
        try:
            chosen = catalogue.check_removable(name, version)
        except UnknownModelError:
            left = self._left_over(name, version)
            if not left:
                raise
            self._delete(left)
            return left
        self._check_not_pinned(chosen)
        self._check_not_rolled_out(chosen)
        if not force:
            self._check_not_running(chosen)
        removed = catalogue.remove(name, version)
        self._delete(removed)
        return removed

    def _check_not_pinned(self, chosen: Iterable[ModelVersion]) -> None:
        names = {str(one) for one in chosen}
        for device, pin in self._registry.capabilities.pinned().items():
            if version_of(pin.bundle) in names:
                raise ConflictError(
                    f"{pin.bundle}: device {device} is pinned to it; run `splitedge server unpin"
                    f" {device}` first"
                )

    def _check_not_rolled_out(self, chosen: Iterable[ModelVersion]) -> None:
        names = {str(one) for one in chosen}
        for rollout in self._registry.rollouts.all():
            plan = rollout.plan
            needed = {str(plan), f"{plan.model}/{rollout.base}"} & names
            if needed and (rollout.live or rollout.standing):
                raise ConflictError(
                    f"{needed.pop()}: roll-out {rollout.id} of {plan} needs it; wait for its end,"
                    f" or run `splitedge server rollout abort {rollout.id}` first"
                )

    def _check_not_running(self, chosen: Iterable[ModelVersion]) -> None:
        reports = self._registry.reports.all()
        names = {str(one) for one in chosen}
        running = [
            device.id
            for device in self._registry.devices()
            if device.active
            and device.id in reports
            and version_of(reports[device.id].running) in names
        ]
        if running:
            raise ConflictError(
                f"{', '.join(sorted(names))}: still runs on {', '.join(running)}, whose offloads"
                " would get no answer; wait until they have moved, or use --force"
            )

    def _left_over(self, name: str, version: int | None) -> tuple[ModelVersion, ...]:
        """Versions that were removed, and whose very files are there: a removal was cut off."""
        left = []
        for one in self._registry.catalogue.removed(name):
            if version not in (None, one.version):
                continue
            with contextlib.suppress(BundleError):
                if digest_of(self._folder(one)) == one.digest:
                    left.append(one)
        return tuple(left)

    def _delete(self, versions: Iterable[ModelVersion]) -> None:
        for one in versions:
            self._artifacts.withdraw(one.name, one.version)
            folder = self._folder(one)
            # in one step, so that a server that is just loading models sees all of it or nothing
            hidden = removed_place(folder)
            shutil.rmtree(hidden, ignore_errors=True)
            try:
                folder.rename(hidden)
            except FileNotFoundError:
                pass  # a removal was cut off after this
            except OSError as err:
                raise StorageError(
                    f"{folder}: {one} is removed, but its files cannot be ({err.strerror}); delete"
                    " the folder"
                ) from err
            shutil.rmtree(hidden, ignore_errors=True)
            with contextlib.suppress(OSError):  # it only spares the user a refusal by the server
                hidden.mkdir(exist_ok=True)

    def _folder(self, one: ModelVersion) -> Path:
        return self._models / one.name / str(one.version)
