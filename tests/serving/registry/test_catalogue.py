"""The catalogue: which version is active, what a fleet should run, what may be removed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.errors import BadRequestError, ConflictError, UnknownModelError
from server.registry.catalogue import ModelCatalogue
from server.registry.database import Registry
from server.registry.records import FleetModel

PROFILE = {"memory_mb": 512, "name": "Raspberry Pi Zero 2 W"}


@pytest.fixture
def registry(registry_url: str) -> Iterator[Registry]:
    ticks = iter(range(1_000_000, 2_000_000))
    registry = Registry.open(registry_url, clock=lambda: float(next(ticks)))
    yield registry
    registry.close()


@pytest.fixture
def catalogue(registry: Registry) -> ModelCatalogue:
    return registry.catalogue


def enrol(registry: Registry, name: str, fleet: str) -> None:
    registry.redeem_token(registry.create_token(fleet), name, PROFILE)


def publish(catalogue: ModelCatalogue, *models: str) -> None:
    for model in models:
        name, version = model.split("/")
        catalogue.publish(name, int(version), digest=f"files of {model}")


def active(catalogue: ModelCatalogue) -> list[str]:
    return [str(one) for one in catalogue.versions() if one.active]


def wanted(catalogue: ModelCatalogue, fleet: str) -> str:
    found = catalogue.wanted(fleet)
    return f"{found.model}/{found.version}"


# which version is active


def test_the_highest_number_so_far_becomes_active(catalogue: ModelCatalogue) -> None:
    publish(catalogue, "cnn/2", "cnn/9", "cnn/3", "vit/1", "cnn/10")
    assert [str(one) for one in catalogue.versions()] == [
        "cnn/2", "cnn/3", "cnn/9", "cnn/10", "vit/1",
    ]  # fmt: skip
    assert active(catalogue) == ["cnn/10", "vit/1"]


def test_publishing_again_does_not_undo_an_activation(catalogue: ModelCatalogue) -> None:
    publish(catalogue, "cnn/1", "cnn/2")
    catalogue.activate("cnn", 1)
    publish(catalogue, "cnn/1", "cnn/2")
    assert active(catalogue) == ["cnn/1"]
    publish(catalogue, "cnn/3")
    assert active(catalogue) == ["cnn/3"]


def test_rolling_back_goes_to_the_version_that_was_active_before_and_then_further(
    catalogue: ModelCatalogue,
) -> None:
    publish(catalogue, "cnn/1", "cnn/2", "cnn/3", "vit/1")
    assert [str(one) for one in catalogue.roll_back("cnn")] == ["cnn/2", "cnn/3"]
    assert [str(one) for one in catalogue.roll_back("cnn")] == ["cnn/1", "cnn/2"]
    with pytest.raises(ConflictError, match=r"cnn/1: no other version of cnn was active before"):
        catalogue.roll_back("cnn")
    assert active(catalogue) == ["cnn/1", "vit/1"]
    with pytest.raises(UnknownModelError, match=r"model 'gnn': not published"):
        catalogue.roll_back("gnn")


def test_rolling_back_after_an_activation_undoes_the_activation(catalogue: ModelCatalogue) -> None:
    publish(catalogue, "cnn/1", "cnn/2", "cnn/3")
    catalogue.activate("cnn", 1)
    assert [str(one) for one in catalogue.roll_back("cnn")] == ["cnn/3", "cnn/1"]
    assert [str(one) for one in catalogue.roll_back("cnn")] == ["cnn/2", "cnn/3"]


# numbers that were used


def test_a_number_is_never_used_twice(catalogue: ModelCatalogue) -> None:
    publish(catalogue, "cnn/1", "cnn/2")
    with pytest.raises(ConflictError, match=r"cnn/1: .* with other files, .* new version"):
        catalogue.publish("cnn", 1, digest="others")
    assert [str(one) for one in catalogue.remove("cnn", 1)] == ["cnn/1"]
    with pytest.raises(ConflictError, match=r"cnn/1: .* published and removed, .* new version"):
        publish(catalogue, "cnn/1")
    with pytest.raises(ConflictError, match=r"cnn/1"):
        catalogue.check_free("cnn", 1, "files of cnn/1")
    catalogue.check_free("cnn", 2, "files of cnn/2")
    catalogue.check_free("cnn", 3, "anything")
    assert [str(one) for one in catalogue.versions()] == ["cnn/2"]


def test_a_version_published_before_digests_takes_the_first_that_it_is_told(
    catalogue: ModelCatalogue,
) -> None:
    catalogue.publish("cnn", 1)
    catalogue.publish("cnn", 1, digest="seen at the next start")
    with pytest.raises(ConflictError):
        catalogue.publish("cnn", 1, digest="others")


# what a fleet should run


def test_a_fleet_without_an_assignment_has_the_model_published_first(
    catalogue: ModelCatalogue,
) -> None:
    assert catalogue.wanted("shed") == FleetModel("shed", None, None, pinned=False, assigned=False)
    publish(catalogue, "vit/1", "cnn/1", "cnn/2")
    assert wanted(catalogue, "shed") == "vit/1"
    publish(catalogue, "vit/2")
    assert wanted(catalogue, "shed") == "vit/2"


def test_an_assigned_fleet_follows_its_own_model_alone(catalogue: ModelCatalogue) -> None:
    publish(catalogue, "vit/1", "cnn/1")
    catalogue.assign("barn", "cnn")
    assert wanted(catalogue, "barn") == "cnn/1"
    publish(catalogue, "vit/2", "gnn/7")
    assert wanted(catalogue, "barn") == "cnn/1"
    publish(catalogue, "cnn/2")
    assert wanted(catalogue, "barn") == "cnn/2"
    catalogue.roll_back("cnn")
    assert (wanted(catalogue, "barn"), wanted(catalogue, "shed")) == ("cnn/1", "vit/2")
    assert catalogue.unassign("barn").model == "vit"


def test_a_pinned_fleet_stays(catalogue: ModelCatalogue) -> None:
    publish(catalogue, "cnn/1", "cnn/2")
    pinned = catalogue.assign("barn", "cnn", 1)
    assert pinned == FleetModel("barn", "cnn", 1, pinned=True, assigned=True)
    publish(catalogue, "cnn/3")
    catalogue.activate("cnn", 2)
    assert wanted(catalogue, "barn") == "cnn/1"
    catalogue.assign("barn", "cnn")
    assert wanted(catalogue, "barn") == "cnn/2"


@pytest.mark.parametrize(("name", "version"), [("gnn", None), ("cnn", 9), ("gnn", 1)])
def test_what_is_not_published_cannot_be_assigned(
    catalogue: ModelCatalogue, name: str, version: int | None
) -> None:
    publish(catalogue, "cnn/1", "vit/1")
    with pytest.raises(UnknownModelError, match=r"not published; available: cnn/1, vit/1"):
        catalogue.assign("barn", name, version)
    with pytest.raises(BadRequestError, match=r"fleet: expected 1 to 63"):
        catalogue.assign("Barn!", "cnn")


def test_fleets_are_those_with_devices_tokens_or_an_assignment(
    registry: Registry, catalogue: ModelCatalogue
) -> None:
    publish(catalogue, "cnn/1")
    enrol(registry, "pi-1", "shed")
    enrol(registry, "pi-2", "gone")
    registry.revoke("pi-2")
    registry.create_token("soon")
    registry.create_token("late", ttl_s=0.5)  # the clock here moves a second a look
    catalogue.assign("barn", "cnn", 1)
    assert [(one.fleet, one.assigned) for one in catalogue.fleets()] == [
        ("barn", True), ("shed", False), ("soon", False),
    ]  # fmt: skip


# removal


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (("cnn", 3), r"cnn/3 is the active version of cnn; activate another one first"),
        (("cnn", 1), r"cnn/1: fleet barn is pinned to cnn/1; assign the fleet another"),
        (("cnn", None), r"fleet barn is pinned to cnn/1; assign the fleet another"),
        (("vit", None), r"vit/1: fleet shed has the model vit by default; assign the fleet"),
        (("vit", 1), r"vit/1: fleet shed has the model vit by default"),
    ],
)
def test_what_a_fleet_needs_is_not_removed(
    registry: Registry, catalogue: ModelCatalogue, what: tuple[str, int | None], reason: str
) -> None:
    publish(catalogue, "vit/1", "cnn/1", "cnn/2", "cnn/3")
    enrol(registry, "pi-1", "shed")
    catalogue.assign("barn", "cnn", 1)
    catalogue.assign("yard", "cnn")
    with pytest.raises(ConflictError, match=reason):
        catalogue.remove(*what)
    with pytest.raises(ConflictError, match=reason):
        catalogue.check_removable(*what)
    assert len(catalogue.versions()) == 4


def test_what_no_fleet_needs_is_removed_and_its_number_kept(catalogue: ModelCatalogue) -> None:
    publish(catalogue, "vit/1", "cnn/1", "cnn/2")
    assert [str(one) for one in catalogue.remove("cnn", 1)] == ["cnn/1"]
    with pytest.raises(UnknownModelError, match="available: cnn/2, vit/1"):
        catalogue.remove("cnn", 1)
    assert [str(one) for one in catalogue.remove("cnn", None)] == ["cnn/2"]
    with pytest.raises(UnknownModelError):
        catalogue.remove("cnn", None)
    publish(catalogue, "cnn/3")
    assert active(catalogue) == ["cnn/3", "vit/1"]
    assert wanted(catalogue, "shed") == "vit/1"


def test_the_model_published_first_stays_the_first_when_its_first_version_is_removed(
    catalogue: ModelCatalogue,
) -> None:
    publish(catalogue, "vit/1", "cnn/1", "vit/2")
    catalogue.remove("vit", 1)
    assert wanted(catalogue, "shed") == "vit/2"


# what devices report


def test_reports_of_devices_are_kept(registry: Registry) -> None:
    enrol(registry, "pi-1", "shed")
    reports = registry.reports
    reports.note_running({"pi-1": "cnn/1/d1", "nobody": "cnn/1/d2"})
    reports.note_update("pi-1", "cnn/1/d1", "cnn/2/d1", "out of memory")
    (found,) = reports.all().values()
    assert (found.running, found.refused, found.why) == ("cnn/1/d1", "cnn/2/d1", "out of memory")
    since = found.refused_at
    reports.note_update("pi-1", "cnn/1/d1", "cnn/2/d1", "out of memory")
    assert reports.all()["pi-1"].refused_at == since
    reports.note_running({"pi-1": "cnn/1/d2"})
    assert reports.all()["pi-1"].refused == "cnn/2/d1"
    reports.note_update("pi-1", "cnn/2/d1", None, None)
    assert reports.all()["pi-1"].refused is None
