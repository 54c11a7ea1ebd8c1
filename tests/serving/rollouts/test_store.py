"""Roll-outs in the registry, on each kind of database: starts, steps, ends, and a kill between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from server.deployment.overview import device_states
from server.deployment.removal import ModelRemoval
from server.errors import BadRequestError, ConflictError, UnknownModelError, UnknownRolloutError
from server.registry.database import Registry
from server.registry.rollouts.records import RolloutPlan
from server.registry.selection.selection import Selection
from server.registry.selection.standing import past_reason
from server.registry.transactions import acting_from
from server.rollouts.facts import read_facts
from server.rollouts.progress import step
from server.rollouts.start import start_rollout
from server.signing.artifacts import ArtifactRepository

PLAN = RolloutPlan("cnn", 2, shares=(0.5, 1.0), wait_s=0.0)
OLD, NEW = "cnn/1/d2", "cnn/2/d2"


class World:
    """A registry with two devices in barn and one in shed, all on `cnn/1`; `cnn/2` is held."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.now = 10_000.0
        self.registry = self.open()
        for version in (1, 2):
            self.registry.catalogue.publish("cnn", version, hold=True)
        self.registry.catalogue.publish("vit", 1)
        for name, fleet in (("pi-1", "barn"), ("pi-2", "barn"), ("pi-3", "shed")):
            self.registry.redeem_token(self.registry.create_token(fleet), name, {})
            self.registry.assign(name, 2, OLD)
        self.runs = dict.fromkeys(("pi-1", "pi-2", "pi-3"), OLD)

    def open(self) -> Registry:
        return Registry.open(self.url, clock=lambda: self.now)

    def restart(self) -> None:
        """As after a kill: what is not in the database is lost."""
        self.registry.close()
        self.registry = self.open()

    def turn(self) -> str:
        """A turn of the server's loop, after which devices run what they are told."""
        self.now += 1.0
        self.registry.touch(*self.runs)
        self.registry.reports.note_running(self.runs)
        (rollout,) = self.registry.rollouts.to_step()
        members = self.registry.rollouts.members(rollout.id)
        done = step(rollout, members, read_facts(self.registry, self.runs), lambda *_: ())
        kept = self.registry.rollouts.apply(
            rollout, done.rollout, joined=done.joined, changed=done.changed, event=done.event
        )
        assert kept
        for state in device_states(self.registry):
            # a version without a variant: the rule chooses the bundle
            wants = state.wants or ""
            self.runs[state.device] = wants if wants.count("/") == 2 else f"{wants}/d2"
        return done.event

    @property
    def on_new(self) -> set[str]:
        return {name for name, bundle in self.runs.items() if bundle == NEW}

    def wanted(self) -> list[tuple[str, int | None]]:
        return [(one.fleet, one.version) for one in self.registry.catalogue.fleets()]

    def audit(self) -> list[str]:
        entries = self.registry.trail.entries()
        return [f"{one.what} {one.detail}" for one in entries if one.what.startswith("rollout")]


@pytest.fixture
def world(registry_url: str) -> Iterator[World]:
    world = World(registry_url)
    yield world
    world.registry.close()


def test_a_held_version_reaches_all_fleets_and_becomes_active(world: World) -> None:
    assert world.wanted() == [("barn", 1), ("shed", 1)]
    start_rollout(world.registry, PLAN)
    sizes = []
    while world.registry.rollouts.to_step():
        world.turn()
        world.restart()  # every turn is the last one of a server
        sizes.append(len(world.on_new))
    assert sizes == [2, 2, 3, 3]
    assert world.wanted() == [("barn", 2), ("shed", 2)]
    (rollout,) = world.registry.rollouts.all()
    assert (rollout.state, rollout.standing) == ("done", False)
    # the roll-out back is that of the catalogue
    with pytest.raises(ConflictError, match="is done; to go back, run `splitedge server models"):
        world.registry.rollouts.abort(rollout.id)
    assert str(world.registry.catalogue.roll_back("cnn")[0]) == "cnn/1"
    told = [line.split()[0] for line in reversed(world.audit())]
    expected = ["start", "join", "share", "join", "done"]
    assert told == [f"rollout.{what}" for what in expected]


@pytest.mark.parametrize("fleet", [None, "barn"])
def test_an_order_that_comes_during_the_last_step_wins(world: World, fleet: str | None) -> None:
    """The newest order wins, as docs/rollouts.md says."""
    start_rollout(world.registry, replace(PLAN, shares=(1.0,), selection=Selection(fleet=fleet)))
    while True:
        world.now += 1.0
        world.registry.reports.note_running(world.runs)
        (rollout,) = world.registry.rollouts.to_step()
        members = world.registry.rollouts.members(rollout.id)
        world.runs |= {one.device: NEW for one in members}
        done = step(rollout, members, read_facts(world.registry, world.runs), lambda *_: ())
        if done.event == "done":
            break
        world.registry.rollouts.apply(
            rollout, done.rollout, joined=done.joined, changed=done.changed, event=done.event
        )
    if fleet is None:
        world.registry.catalogue.publish("cnn", 3)  # becomes active
    else:
        world.registry.catalogue.assign(fleet, "vit")
    before = world.wanted()
    assert not world.registry.rollouts.apply(rollout, done.rollout, event=done.event)
    assert world.wanted() == before
    assert world.turn() == "superseded"
    assert world.wanted() == before


def test_a_roll_out_to_one_fleet_pins_it_and_leaves_the_other(world: World) -> None:
    start_rollout(world.registry, replace(PLAN, selection=Selection(fleet="shed")))
    while world.registry.rollouts.to_step():
        world.turn()
    assert world.on_new == {"pi-3"}
    assert world.wanted() == [("barn", 1), ("shed", 2)]
    # the next one of this fleet starts from there, and can be taken back
    world.registry.catalogue.publish("cnn", 3, hold=True)
    plan = replace(PLAN, version=3, selection=Selection(fleet="shed"))
    started = start_rollout(world.registry, plan)
    assert started.base == 2
    world.turn()
    assert world.runs["pi-3"] == "cnn/3/d2"
    world.registry.rollouts.abort(started.id)
    world.turn()
    assert world.runs["pi-3"] == NEW


def test_an_aborted_roll_out_restores_the_very_bundles(world: World) -> None:
    # the rule would choose d2 again: what ran before was another bundle of the version
    world.runs["pi-1"] = world.runs["pi-2"] = world.runs["pi-3"] = "cnn/1/d4-int8"
    world.registry.reports.note_running(world.runs)
    started = start_rollout(world.registry, replace(PLAN, shares=(1.0,), wait_s=600.0))
    world.turn()
    assert world.on_new == set(world.runs)
    world.turn()
    aborted = world.registry.rollouts.abort(started.id)
    assert (aborted.state, aborted.reason) == ("aborted", "operator aborted it")
    world.restart()
    assert {state.wants for state in device_states(world.registry)} == {"cnn/1/d4-int8"}
    world.now += 20.0
    world.turn()
    assert set(world.runs.values()) == {"cnn/1/d4-int8"}
    world.now += 20.0
    world.turn()
    assert world.registry.rollouts.to_step() == ()


def test_a_step_that_an_operator_overtook_is_not_kept(world: World) -> None:
    started = start_rollout(world.registry, PLAN)
    world.registry.touch(*world.runs)
    done = step(started, (), read_facts(world.registry, world.runs), lambda *_: ())
    world.registry.rollouts.pause(started.id)
    assert not world.registry.rollouts.apply(started, done.rollout, joined=done.joined)
    assert world.registry.rollouts.members(started.id) == ()
    assert world.turn() == ""  # paused
    world.registry.rollouts.resume(started.id)
    world.turn()
    assert len(world.on_new) == 2


def test_one_roll_out_at_a_time_moves_the_devices_of_a_fleet(world: World) -> None:
    barn = start_rollout(world.registry, replace(PLAN, selection=Selection(fleet="barn")))
    shed = start_rollout(world.registry, replace(PLAN, selection=Selection(fleet="shed")))
    for chosen in (Selection(fleet="barn"), Selection(device="pi-3"), Selection()):
        with pytest.raises(ConflictError, match=r"rollout abort \d"):
            start_rollout(world.registry, replace(PLAN, selection=chosen))
    for one in (barn, shed):
        world.registry.rollouts.abort(one.id)
    start_rollout(world.registry, PLAN)


REFUSED_PLANS: list[tuple[RolloutPlan, type[Exception], str]] = [
    (replace(PLAN, version=9), UnknownModelError, "cnn/9: not published; available: cnn/1, cnn/2"),
    (replace(PLAN, version=1), ConflictError, "unless the server runs with --new-versions hold"),
    (RolloutPlan("vit", 1), ConflictError, r"\(barn has cnn, shed has cnn\); give a fleet"),
    (replace(PLAN, selection=Selection(tag="x")), ConflictError, "no device .* by tag=x"),
    (replace(PLAN, shares=(0.5,)), BadRequestError, "end with 100%.*got 50%"),
    (replace(PLAN, shares=(0.5, 0.5, 1.0)), BadRequestError, "ascending"),
    (replace(PLAN, wait_s=-1.0), BadRequestError, "wait: expected 0 s to 30 days"),
    (replace(PLAN, health="speed<3"), BadRequestError, "health: speed is not known"),
]


def test_a_start_that_cannot_be_says_what_to_do(world: World) -> None:
    for plan, error, told in REFUSED_PLANS:
        with pytest.raises(error, match=told):
            start_rollout(world.registry, plan)
    assert world.registry.rollouts.all() == ()
    with pytest.raises(BadRequestError, match="tag: expected 1 to 63"):
        Selection(tag="X")


def test_a_version_that_a_roll_out_needs_is_not_removed(world: World, tmp_path: Path) -> None:
    artifacts = ArtifactRepository(tmp_path / "state")
    artifacts.open_or_create()
    removal = ModelRemoval(world.registry, artifacts, tmp_path / "models")
    started = start_rollout(world.registry, PLAN)
    with pytest.raises(ConflictError, match=f"roll-out {started.id} of cnn/2 needs it"):
        removal.remove("cnn", 2)
    world.registry.rollouts.abort(started.id)
    assert [str(one) for one in removal.remove("cnn", 2)] == ["cnn/2"]


def test_a_roll_out_by_tag_is_past_once_its_fleets_are_given_another_version(
    world: World, tmp_path: Path
) -> None:
    registry = world.registry
    registry.tags.add("pi-1", ["canary"])
    started = start_rollout(registry, replace(PLAN, selection=Selection(tag="canary")))
    while registry.rollouts.of(started.id).live:
        world.turn()
    assert registry.rollouts.of(started.id).standing
    world.turn()
    assert world.on_new == {"pi-1"}
    registry.catalogue.publish("cnn", 3)
    registry.catalogue.roll_back("cnn")
    assert registry.rollouts.to_step() == ()
    assert not registry.rollouts.of(started.id).standing
    assert {one.wants for one in device_states(registry)} & {"cnn/2", NEW} == set()
    artifacts = ArtifactRepository(tmp_path / "state")
    artifacts.open_or_create()
    removal = ModelRemoval(registry, artifacts, tmp_path / "models")
    world.registry.reports.note_running(dict.fromkeys(world.runs, OLD))
    assert [str(one) for one in removal.remove("cnn", 2)] == ["cnn/2"]


def test_a_roll_out_by_tag_is_past_once_its_devices_are_gone(world: World) -> None:
    """No fleet is left then that should run the version before."""
    registry = world.registry
    registry.tags.add("pi-1", ["canary"])
    started = start_rollout(registry, replace(PLAN, selection=Selection(tag="canary")))
    while registry.rollouts.of(started.id).live:
        world.turn()
    registry.catalogue.assign("shed", "vit")
    for device in ("pi-1", "pi-2"):
        registry.revoke(device)
    world.turn()
    assert registry.rollouts.to_step() == ()
    over = registry.rollouts.of(started.id)
    assert (over.standing, over.reason) == (False, past_reason(1))


def test_a_rollback_at_once_does_not_revive_a_standing_roll_out(world: World) -> None:
    registry = world.registry
    registry.tags.add("pi-1", ["canary"])
    registry.tags.add("pi-3", ["canary"])
    plan = replace(PLAN, shares=(1.0,), selection=Selection(tag="canary"))
    started = start_rollout(registry, plan)
    while registry.rollouts.of(started.id).live:
        world.turn()
    assert world.on_new == {"pi-1", "pi-3"}
    # one fleet moves and goes back, and no server looks meanwhile: its device is released
    registry.catalogue.publish("vit", 2)
    registry.catalogue.assign("shed", "vit")
    registry.catalogue.unassign("shed")
    assert registry.rollouts.of(started.id).standing
    world.turn()
    assert world.on_new == {"pi-1"}
    # the model does, in all fleets
    registry.catalogue.publish("cnn", 3)
    registry.catalogue.roll_back("cnn")
    assert world.wanted() == [("barn", 1), ("shed", 1)]
    over = registry.rollouts.of(started.id)
    assert (over.standing, over.reason) == (False, past_reason(1))
    assert {one.wants for one in device_states(registry)} & {"cnn/2", NEW} == set()


def test_who_starts_and_aborts_a_roll_out_is_kept(world: World) -> None:
    with acting_from("10.0.0.7", lambda: "key:ci"):
        started = start_rollout(world.registry, PLAN)
        aborted = world.registry.rollouts.abort(started.id)
    assert (started.who, aborted.reason) == ("key:ci", "key:ci aborted it")
    with acting_from("root on this machine"):
        started = start_rollout(world.registry, PLAN)
    assert started.who == "operator"
    assert [one.who for one in world.registry.trail.entries(3)] == ["operator", "key:ci", "key:ci"]
    given = world.registry.rollouts.abort(started.id, who="operator:anna")
    assert given.reason == "operator:anna aborted it"


def test_pins_come_first(world: World) -> None:
    world.registry.catalogue.assign("barn", "cnn", 1)
    with pytest.raises(ConflictError, match=r"fleet barn is pinned to cnn/1, .* --fleet barn"):
        start_rollout(world.registry, replace(PLAN, selection=Selection(device="pi-1")))
    world.registry.capabilities.pin("pi-3", bundle=OLD)
    with pytest.raises(ConflictError, match="splitedge server unpin DEVICE"):
        start_rollout(world.registry, PLAN)
    world.registry.capabilities.unpin("pi-3")
    start_rollout(world.registry, PLAN)
    world.turn()
    assert world.on_new == {"pi-3"}


def test_a_refusal_of_an_earlier_roll_out_is_forgotten_when_a_device_joins(world: World) -> None:
    world.registry.reports.note_update("pi-3", OLD, NEW, "no space")
    start_rollout(world.registry, replace(PLAN, selection=Selection(device="pi-3")))
    world.turn()
    assert world.registry.reports.all()["pi-3"].refused is None
    world.registry.reports.note_update("pi-3", OLD, NEW, "no space again")
    world.runs["pi-3"] = OLD
    assert world.turn() == "failed"
    assert world.registry.rollouts.all()[0].reason == f"pi-3: it refused {NEW}: no space again"


# SQLite's integers end at 2**63, and those of PostgreSQL's column at 2**31
@pytest.mark.parametrize("number", [7, 0, -1, 2**31, 2**63])
def test_an_unknown_number_is_told(world: World, number: int) -> None:
    unknown = f"roll-out {number}: unknown; the newest are none"
    with pytest.raises(UnknownRolloutError, match=unknown):
        world.registry.rollouts.pause(number)
    with pytest.raises(UnknownRolloutError, match=unknown):
        world.registry.rollouts.of(number)
