"""Removal of versions: what it refuses, what it deletes, and what a kill leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edge_sdk.errors import StorageError
from exporters.versions import next_version
from server.backend.models import ModelStore
from server.deployment.publisher import ModelPublisher
from server.deployment.removal import ModelRemoval
from server.errors import ConflictError, UnknownModelError
from server.registry.database import Registry, open_registry
from server.signing.artifacts import ArtifactRepository

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


class Place:
    """A server's state with digits/1 and digits/2 published, and a device; no server runs."""

    def __init__(self, state: Path, exported: Exported) -> None:
        self.models = state / "models"
        for version in (1, 2):
            exported.install(self.models, version=version)
        self.registry: Registry = open_registry(state)
        self.artifacts = ArtifactRepository(state)
        self.artifacts.open_or_create()
        store = ModelStore(self.models)
        ModelPublisher(store, self.artifacts, self.registry.catalogue).refresh()
        self.registry.redeem_token(self.registry.create_token(), "pi-1", {})
        self.removal = ModelRemoval(self.registry, self.artifacts, self.models)

    def files(self, version: int) -> list[Path]:
        """What is left of a version of digits, signed or not."""
        of_version = f"digits/{version}"
        signed = self.artifacts.targets_folder / "bundles" / of_version
        return [path for place in (self.models / of_version, signed) for path in place.rglob("*")]


@pytest.fixture
def place(tmp_path: Path, exported: Exported) -> Iterator[Place]:
    made = Place(tmp_path, exported)
    yield made
    made.registry.close()


def test_files_and_signed_bundles_of_the_version_alone_are_deleted(place: Place) -> None:
    assert place.files(1)
    assert [str(one) for one in place.removal.remove("digits", 1)] == ["digits/1"]
    assert place.files(1) == []
    assert place.files(2)
    assert place.artifacts.withdraw("digits", 1) == 0
    with pytest.raises(UnknownModelError, match=r"digits/1: not published; available: digits/2"):
        place.removal.remove("digits", 1)


def test_what_a_device_runs_is_removed_by_force_alone(place: Place) -> None:
    place.registry.reports.note_running({"pi-1": "digits/1/d2"})
    with pytest.raises(ConflictError, match=r"digits/1: still runs on pi-1, .* or use --force"):
        place.removal.remove("digits", 1)
    assert place.files(1)
    place.removal.remove("digits", 1, force=True)
    assert place.files(1) == []


def test_what_a_device_is_pinned_to_is_not_removed(place: Place) -> None:
    place.registry.capabilities.pin("pi-1", depth=None, bundle="digits/1/d2")
    with pytest.raises(ConflictError, match=r"device pi-1 is pinned .* server unpin pi-1` first"):
        place.removal.remove("digits", 1, force=True)
    place.registry.capabilities.unpin("pi-1")
    place.removal.remove("digits", 1)


def test_what_a_revoked_device_ran_is_removed(place: Place) -> None:
    place.registry.reports.note_running({"pi-1": "digits/1/d2"})
    place.registry.revoke("pi-1")
    place.removal.remove("digits", 1)
    assert place.files(1) == []


def test_a_removal_that_was_cut_off_is_finished_by_the_next(place: Place) -> None:
    place.registry.catalogue.remove("digits", 1)  # and then the process died
    assert place.files(1)
    place.removal.remove("digits", 1)
    assert place.files(1) == []


def test_another_export_under_a_removed_number_is_left_alone(
    place: Place, exported: Exported
) -> None:
    place.removal.remove("digits", 1)
    folder = exported.install(place.models, version=1, bad=True)
    with pytest.raises(UnknownModelError):
        place.removal.remove("digits", 1)
    assert (folder / "model.json").exists()
    store = ModelStore(place.models)
    publisher = ModelPublisher(store, place.artifacts, place.registry.catalogue)
    publisher.refresh()
    assert publisher.published("digits", "1") is None


def test_the_next_export_gets_no_number_that_was_removed(place: Place, exported: Exported) -> None:
    exported.install(place.models, name="letters")
    store = ModelStore(place.models)
    ModelPublisher(store, place.artifacts, place.registry.catalogue).refresh()
    assert [str(one) for one in place.removal.remove("letters")] == ["letters/1"]
    assert [path.name for path in (place.models / "letters").rglob("*")] == [".1-removed"]
    assert next_version(place.models, "letters") == 2
    place.registry.catalogue.assign("default", "digits", 1)
    place.registry.catalogue.activate("digits", 1)
    place.removal.remove("digits", 2)
    assert next_version(place.models, "digits") == 3


def test_files_that_cannot_be_moved_away_are_told(place: Place) -> None:
    (place.models / "digits" / ".1-removed").write_bytes(b"in the way")
    with pytest.raises(StorageError, match=r"digits/1 is removed, but its files cannot be"):
        place.removal.remove("digits", 1)
    assert [str(one) for one in place.registry.catalogue.versions()] == ["digits/2"]
