"""The state machine of a roll-out: any order of events, with a simulated fleet. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.errors import BadRequestError
from server.registry.records import Device, DeviceReport, FleetModel
from server.registry.rollouts.records import Member, Order, Rollout, RolloutPlan
from server.registry.rollouts.targets import target_of
from server.registry.selection.selection import Selection
from server.rollouts.health import Behaviour, Finding, Health, parse_health
from server.rollouts.progress import RETURN_S, Facts, eligible, quota, step

PLAN = RolloutPlan(
    "cnn", 2, shares=(0.25, 0.5, 1.0), health="fallback<5%", wait_s=60.0, answers_min=100
)
OLD, NEW = "cnn/1/d2", "cnn/2/d1"
BARN = FleetModel("barn", "cnn", 1, pinned=False, assigned=False)
GOOD, BAD = Behaviour(exits=200), Behaviour(exits=100, fallbacks=100)


def device(name: str, *, tags: tuple[str, ...] = ()) -> Device:
    return Device(name, "barn", "", {}, 2, OLD, 0.0, None, None, tags=tags)


class Fleet:
    """One roll-out over simulated devices, as the registry and the network would carry it.

    Attributes:
        runs: bundle that each device runs. away: devices that are off.
        behaviour: what the devices of the share did; judged as the server judges.
    """

    def __init__(self, count: int = 8, plan: RolloutPlan = PLAN) -> None:
        self.now = 1_000.0
        self.fleet = BARN
        self.devices = {f"pi-{n}": device(f"pi-{n}") for n in range(count)}
        self.runs = dict.fromkeys(self.devices, OLD)
        self.reports: dict[str, DeviceReport] = {}
        self.away: set[str] = set()
        self.pinned: set[str] = set()
        self.heard_at: dict[str, float] = {}
        self.settled = True
        self.behaviour = GOOD
        self.rollout = Rollout(1, plan, 1, "running", 0, self.now, self.now, "operator")
        self.members: dict[str, Member] = {}

    @property
    def states(self) -> str:
        return self.rollout.state

    @property
    def on_new(self) -> set[str]:
        return {name for name, bundle in self.runs.items() if bundle == NEW}

    def facts(self) -> Facts:
        present = self.devices.keys() - self.away
        return Facts(
            self.now,
            {"barn": self.fleet},
            tuple(self.devices.values()),
            pinned=self.pinned,
            present=present,
            running={name: self.runs[name] for name in present},
            reports=self.reports,
            heard_at=self.heard_at,
            settled=self.settled,
        )

    def judge(self, rollout: Rollout, _taken: object, _others: object) -> tuple[Finding, ...]:
        health = parse_health(rollout.plan.health)
        return health.judge(self.behaviour, Behaviour(), rollout.plan.answers_min)

    def turn(self, after_s: float = 1.0) -> str:
        """A step of the loop; what happened."""
        self.now += after_s
        done = step(self.rollout, list(self.members.values()), self.facts(), self.judge)
        self.rollout = done.rollout
        for member in (*done.joined, *done.changed):
            self.members[member.device] = member
        for member in done.joined:  # as the registry does
            self.reports.pop(member.device, None)
        if done.event == "done" and not done.rollout.standing:
            self.fleet = replace(self.fleet, version=2)
        return done.event

    def target(self, name: str) -> str:
        """What the assignment gives a device: its fleet's bundle, or what the roll-out wants."""
        if name in self.pinned:
            return self.runs[name]
        orders = [Order(self.rollout, self.members[name])] if name in self.members else []
        target = target_of(orders, self.fleet)
        if target is None:
            # the rule of depths keeps a bundle of the version, and chooses another one after NEW
            keeps = self.fleet.version == 1 and self.runs[name] == OLD
            return NEW if self.fleet.version == 2 else OLD if keeps else "cnn/1/d9"
        return target.bundle or NEW

    def follow(self) -> None:
        """Each device that is there runs what it was told, if it was told anything."""
        for name in self.devices.keys() - self.away:
            if name in self.members or self.fleet.version == 2:
                self.runs[name] = self.target(name)

    def advance(self) -> None:
        """Bring the present share to its end: devices take the version, and it is watched."""
        for after_s in (1.0, 1.0, 61.0):
            self.turn(after_s)
            self.follow()


def test_a_good_version_reaches_all_devices_share_by_share() -> None:
    fleet = Fleet()
    counts = []
    while fleet.rollout.live:
        fleet.advance()
        counts.append(len(fleet.on_new))
    assert counts == [2, 4, 8]
    assert fleet.rollout.state == "done"


def test_shares_grow_by_inclusion_and_are_the_same_after_a_restart() -> None:
    fleet, again = Fleet(), Fleet()
    fleet.advance()
    first = set(fleet.members)
    again.turn()
    assert set(again.members) == first
    fleet.advance()
    assert first < set(fleet.members)
    other = Fleet(plan=replace(PLAN, version=3))
    other.turn()
    assert set(other.members) != first  # a hash of roll-out and device: not always the same ones


def test_devices_that_are_away_go_last() -> None:
    fleet = Fleet()
    fleet.turn()
    first = set(fleet.members)
    fleet = Fleet()
    fleet.away = set(first)
    fleet.turn()
    assert len(fleet.members) == 2
    assert not first & set(fleet.members)


def test_a_device_that_goes_before_it_took_the_version_holds_no_share_up() -> None:
    fleet = Fleet()
    fleet.turn()
    first = set(fleet.members)
    fleet.away = set(first)
    fleet.turn()
    assert len(fleet.members) == 4
    fleet.follow()
    fleet.turn()
    assert fleet.turn(61.0) == "share"
    fleet.away.clear()
    fleet.follow()
    assert first < fleet.on_new  # they keep their places


def test_devices_that_go_after_they_took_the_version_keep_their_places() -> None:
    fleet = Fleet()
    fleet.turn()
    fleet.follow()
    fleet.turn()
    first = set(fleet.members)
    fleet.away = set(first)
    for _ in range(3):
        fleet.turn(15.0)  # the share is still watched
    assert set(fleet.members) == first


def test_a_share_takes_no_devices_that_are_away() -> None:
    fleet = Fleet(plan=replace(PLAN, health=""))
    fleet.away = set(fleet.devices) - {"pi-3"}
    for _ in range(5):
        fleet.turn()
    assert set(fleet.members) == {"pi-3"}
    fleet.away.clear()
    for _ in range(5):
        fleet.turn()
    assert len(fleet.members) == 2  # a quarter of eight, however long they were away


def test_after_a_start_of_the_server_its_devices_have_time_to_be_heard() -> None:
    fleet = Fleet()
    fleet.turn()
    first = set(fleet.members)
    fleet.away = set(first)  # as far as the new server knows
    fleet.settled = False
    fleet.turn()
    assert set(fleet.members) == first
    fleet.settled = True
    fleet.turn()
    assert len(fleet.members) == 4


def test_a_version_is_taken_at_the_time_of_the_heartbeat_however_late_the_turn_is() -> None:
    fleet = Fleet()
    fleet.turn()
    fleet.follow()
    name, other = sorted(fleet.members)
    fleet.heard_at[name] = fleet.now + 2.0
    fleet.turn(9.0)
    assert fleet.members[name].taken_at == fleet.now - 7.0
    assert fleet.members[other].taken_at == fleet.now


def test_a_pin_that_is_taken_off_again_fails_nothing() -> None:
    fleet = Fleet()
    fleet.turn()
    fleet.follow()
    fleet.turn()
    name = min(fleet.members)
    fleet.pinned.add(name)
    fleet.runs[name] = OLD
    fleet.turn()
    assert fleet.members[name].taken_at is None
    fleet.pinned.clear()
    assert fleet.turn() == ""
    fleet.follow()
    fleet.turn()
    assert fleet.rollout.live
    assert fleet.members[name].taken_at is not None


def test_a_share_is_watched_for_the_whole_time_and_with_enough_answers() -> None:
    fleet = Fleet()
    fleet.turn()
    fleet.follow()
    fleet.turn()  # they have taken it
    fleet.behaviour = Behaviour(exits=99)
    fleet.turn(1_000.0)
    assert fleet.rollout.stage == 0  # 99 answers say nothing
    fleet.behaviour = GOOD
    assert fleet.turn() == "share"
    fleet.turn()
    fleet.follow()
    fleet.turn()
    fleet.turn(59.0)
    assert fleet.rollout.stage == 1
    assert fleet.turn(2.0) == "share"


def test_a_share_with_worse_health_goes_back_at_once() -> None:
    fleet = Fleet()
    fleet.turn()
    fleet.follow()
    fleet.behaviour = BAD
    assert fleet.turn() == "failed"
    assert fleet.rollout.reason == "fallback is 100.0 %, expected below 5.0 %"
    fleet.follow()
    assert set(fleet.runs.values()) == {OLD}  # the very bundle, not what the rule would choose
    fleet.turn()
    assert all(one.returned_at is not None for one in fleet.members.values())


@pytest.mark.parametrize("how", ["refuses", "goes back by itself"])
def test_one_device_that_does_not_keep_the_version_takes_all_back(how: str) -> None:
    fleet = Fleet(plan=replace(PLAN, shares=(0.5, 1.0)))
    fleet.turn()
    fleet.follow()
    bad = min(fleet.members)
    if how == "refuses":
        fleet.runs[bad] = OLD
        fleet.reports[bad] = DeviceReport(bad, OLD, NEW, "golden inputs differ", 5.0)
    else:
        fleet.turn()
        fleet.runs[bad] = OLD
    assert fleet.turn() == "failed"
    expected = "it refused cnn/2/d1: golden" if how == "refuses" else "it went back to cnn/1/d2"
    assert fleet.rollout.reason.startswith(f"{bad}: {expected}")
    fleet.follow()
    assert not fleet.on_new


def test_as_many_failures_as_the_operator_tolerates_stop_nothing() -> None:
    fleet = Fleet(plan=replace(PLAN, shares=(0.5, 1.0), failures_max=1))
    fleet.turn()
    fleet.follow()
    first, second, *_ = sorted(fleet.members)
    for name, event in ((first, ""), (second, "failed")):
        fleet.runs[name] = OLD
        fleet.reports[name] = DeviceReport(name, OLD, NEW, "no space", 5.0)
        assert fleet.turn() == event


def test_an_old_refusal_of_the_version_does_not_count() -> None:
    fleet = Fleet()
    names = list(fleet.devices)
    fleet.reports = {one: DeviceReport(one, OLD, NEW, "in another roll-out", 5.0) for one in names}
    fleet.turn()
    fleet.follow()
    assert fleet.turn() == ""
    assert fleet.rollout.live


def test_a_device_that_was_away_joins_when_it_comes_back() -> None:
    fleet = Fleet(count=2, plan=replace(PLAN, shares=(1.0,), health=""))
    fleet.away = {"pi-0"}
    fleet.turn()
    fleet.follow()
    assert (fleet.target("pi-0"), fleet.runs["pi-0"]) == (NEW, OLD)
    fleet.turn(70.0)
    assert fleet.turn(61.0) == "done"  # it holds nobody up
    fleet.away.clear()
    fleet.follow()
    assert fleet.on_new == {"pi-0", "pi-1"}


def test_nothing_is_judged_while_every_device_of_the_share_is_away() -> None:
    fleet = Fleet(count=2, plan=replace(PLAN, health=""))
    fleet.away = set(fleet.devices)
    for _ in range(3):
        assert fleet.turn(10_000.0) == ""


def test_a_pinned_device_and_a_pinned_fleet_stay() -> None:
    fleet = Fleet(plan=replace(PLAN, shares=(1.0,)))
    fleet.pinned = {"pi-3"}
    fleet.turn()
    assert fleet.members.keys() == fleet.devices.keys() - {"pi-3"}
    fleet = Fleet()
    fleet.fleet = replace(BARN, pinned=True)
    assert fleet.turn() == "superseded"
    # unless the roll-out is of this very fleet
    fleet = Fleet(plan=replace(PLAN, selection=Selection(fleet="barn")))
    fleet.fleet = replace(BARN, pinned=True)
    fleet.turn()
    assert len(fleet.members) == 2


def test_the_newest_order_wins_over_a_roll_out() -> None:
    fleet = Fleet()
    fleet.turn()
    fleet.follow()
    fleet.fleet = replace(BARN, version=7)
    assert fleet.target(next(iter(fleet.members))) == "cnn/1/d9"  # its fleet's
    assert fleet.turn() == "superseded"
    assert fleet.rollout.reason == "no fleet should run cnn/1 any more"


def test_a_paused_roll_out_waits_and_then_judges_what_happened() -> None:
    fleet = Fleet()
    fleet.turn()
    fleet.follow()
    fleet.turn()
    fleet.rollout = replace(fleet.rollout, state="paused")
    fleet.runs[next(iter(fleet.members))] = OLD
    assert fleet.turn(1_000.0) == ""
    fleet.rollout = replace(fleet.rollout, state="running", watched_at=None)
    assert fleet.turn() == "failed"


def test_a_roll_out_to_a_tag_stays_in_force_until_the_fleet_moves() -> None:
    plan = replace(PLAN, selection=Selection(tag="canary"), shares=(1.0,))
    fleet = Fleet(plan=plan)
    fleet.devices["pi-5"] = device("pi-5", tags=("canary",))
    fleet.advance()
    fleet.turn()
    assert (fleet.rollout.state, fleet.rollout.standing) == ("done", True)
    assert fleet.on_new == {"pi-5"}
    assert fleet.target("pi-5") == NEW
    fleet.fleet = replace(BARN, version=3)
    assert fleet.target("pi-5") == "cnn/1/d9"  # its fleet's
    fleet.turn()
    assert (fleet.rollout.state, fleet.rollout.standing) == ("done", False)
    fleet.fleet = BARN
    assert fleet.target("pi-5") != NEW  # it stays so where the fleet goes back


def test_a_device_still_fetching_the_version_counts_as_back_only_later() -> None:
    fleet = Fleet()
    fleet.turn()
    fleet.rollout = replace(fleet.rollout, state="aborted", ended_at=fleet.now)
    fleet.turn()
    assert all(one.returned_at is None for one in fleet.members.values())
    fleet.turn(RETURN_S)
    assert all(one.returned_at is not None for one in fleet.members.values())


class AnyOrder(RuleBasedStateMachine):
    """Any order of events, with a stop of the server after any of them.

    Nothing but roll-out, members and devices is kept from one rule to the next: that is what a kill
    of the server leaves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = Fleet(6)
        self.before: set[str] = set()
        self.left: set[str] = set()  # members that were away, or pinned, at some time
        self.replaced: set[str] = set()  # members in whose place another one may have joined
        self.stage = 0

    name = st.sampled_from([f"pi-{n}" for n in range(6)])

    @rule()
    def take(self) -> None:
        """Devices of the share take the version, and say so: much of what may go wrong is later."""
        self.turn(1.0)
        self.world.follow()
        self.turn(1.0)

    @rule(after_s=st.sampled_from([1.0, 30.0, 61.0, 300.0]))
    def turn(self, after_s: float) -> None:
        # a member that is away keeps its place once it showed what it thinks of the version
        away = {
            name
            for name, one in self.world.members.items()
            if name in self.world.away and not one.taken_at and not one.trouble
        }
        self.replaced |= away | (self.world.pinned & set(self.world.members))
        self.world.turn(after_s)

    @rule()
    def follow(self) -> None:
        self.world.follow()

    @rule(name=name)
    def switch_off(self, name: str) -> None:
        self.world.away.add(name)
        self.left |= {name} & set(self.world.members)

    @precondition(lambda self: self.world.members)
    @rule(data=st.data())
    def switch_off_a_member(self, data: st.DataObject) -> None:
        self.switch_off(data.draw(st.sampled_from(sorted(self.world.members))))

    @rule(name=name)
    def switch_on(self, name: str) -> None:
        self.world.away.discard(name)

    @rule(name=name, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        (self.world.pinned.add if pinned else self.world.pinned.discard)(name)
        self.left |= {name} & set(self.world.members)

    @rule(health=st.sampled_from([GOOD, GOOD, GOOD, BAD, Behaviour()]))
    def behave(self, health: Behaviour) -> None:
        self.world.behaviour = health

    @precondition(lambda self: self.world.rollout.live)
    @rule(name=name)
    def refuse(self, name: str) -> None:
        if name in self.world.members and name not in self.world.away | self.world.pinned:
            self.world.runs[name] = OLD
            self.world.reports[name] = DeviceReport(name, OLD, NEW, "bad", self.world.now)

    @precondition(lambda self: self.world.rollout.live)
    @rule(what=st.sampled_from(["pause", "resume", "resume", "abort"]))
    def operate(self, what: str) -> None:
        rollout, now = self.world.rollout, self.world.now
        if what == "pause":
            rollout = replace(rollout, state="paused")
        elif what == "resume":
            rollout = replace(rollout, state="running", watched_at=None)
        else:
            rollout = replace(rollout, state="aborted", ended_at=now)
        self.world.rollout = rollout

    @invariant()
    def shares_only_grow_and_are_never_too_large(self) -> None:
        members = set(self.world.members)
        assert self.before <= members
        assert self.stage <= self.world.rollout.stage
        if members != self.before:
            rollout, facts = self.world.rollout, self.world.facts()
            filling = [
                name
                for name, one in self.world.members.items()
                if one.taken_at or one.trouble or name in facts.present
            ]
            most = quota(rollout.share, 6) if rollout.share < 1.0 else 6
            assert len(set(filling) - self.before) <= most
        self.before, self.stage = members, self.world.rollout.stage

    @invariant()
    def devices_that_go_away_make_no_share_larger(self) -> None:
        rollout = self.world.rollout
        if rollout.share < 1.0:
            assert len(set(self.world.members) - self.replaced) <= quota(rollout.share, 6)

    @invariant()
    def a_share_asks_no_more_devices_than_it_has(self) -> None:
        rollout = self.world.rollout
        if rollout.share < 1.0:
            asked = {name for name, one in self.world.members.items() if one.taken_at is None}
            assert len(asked - self.left) <= quota(rollout.share, 6)

    @invariant()
    def who_is_in_no_share_stays(self) -> None:
        if self.world.fleet.version == 1:
            assert self.world.on_new <= set(self.world.members)

    @invariant()
    def only_a_watched_and_healthy_last_share_is_done(self) -> None:
        rollout = self.world.rollout
        if rollout.state == "done":
            assert rollout.stage == 2
            assert rollout.watched_at is not None
            assert (rollout.ended_at or 0.0) - rollout.watched_at >= PLAN.wait_s

    def teardown(self) -> None:
        world = self.world
        world.away.clear()
        world.pinned.clear()
        if world.rollout.live:
            world.rollout = replace(world.rollout, state="aborted", ended_at=world.now)
        for _ in range(3):
            world.turn(RETURN_S)
            world.follow()
        expected = NEW if world.rollout.state == "done" else OLD
        assert set(world.runs.values()) == {expected}
        super().teardown()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_the_quota_is_at_least_one_device_and_never_more_than_there_are() -> None:
    assert [quota(0.1, count) for count in (1, 5, 10, 11, 100)] == [1, 1, 1, 2, 10]
    assert quota(1.0, 7) == 7
    assert quota(0.5, 0) == 0


def test_a_selection_must_match_in_all_that_it_names() -> None:
    fleet = Fleet(plan=replace(PLAN, selection=Selection("barn", "canary", "pi-2")))
    assert eligible(fleet.rollout, fleet.facts()) == []
    fleet.devices["pi-2"] = device("pi-2", tags=("canary", "x"))
    assert [one.id for one in eligible(fleet.rollout, fleet.facts())] == ["pi-2"]
    fleet.devices["pi-2"] = replace(fleet.devices["pi-2"], revoked_at=1.0)
    assert eligible(fleet.rollout, fleet.facts()) == []


# health


def judged(text: str, share: Behaviour, others: Behaviour | None = None) -> list[str]:
    health: Health = parse_health(text)
    return [one.verdict for one in health.judge(share, others or Behaviour(), 100)]


def test_conditions_are_judged_by_shares_of_the_answers() -> None:
    share = Behaviour(exits=60, offloads=34, fallbacks=6, audits=40, disagreements=2)
    text = "fallback<15%, fallback<0.16, offload<40%, exit>60%, agreement>0.94"
    assert judged(text, share) == ["worse", "good", "good", "worse", "good"]
    few = Behaviour(exits=60, offloads=34, audits=29)
    assert judged("fallback<5%,agreement>0.9", few) == ["unknown", "unknown"]
    assert judged("agreement>0.9", few + Behaviour(exits=10)) == ["unknown"]  # 29 audits
    assert judged("", share) == []


def test_a_latency_is_the_95th_percentile() -> None:
    # of the bins, the seventh is 2^-1 to 2^0 ms, the tenth is 4 to 8 ms
    counts = [0] * 21
    counts[6], counts[9] = 94, 6
    share = Behaviour(exits=100, latency=tuple(counts))
    assert judged("latency<8ms,latency<4ms", share) == ["good", "worse"]
    assert judged("latency<8ms", Behaviour(exits=100)) == ["unknown"]


def test_a_comparison_is_with_the_devices_that_stayed_and_leaves_some_slack() -> None:
    stayed = Behaviour(offloads=60, fallbacks=40)
    for fallbacks, verdict in ((47, "good"), (48, "worse")):
        share = Behaviour(offloads=100 - fallbacks, fallbacks=fallbacks)
        assert judged("fallback<1.2x", share, stayed) == [verdict]
    none = Behaviour(exits=1000)
    one = Behaviour(exits=990, offloads=9, fallbacks=1)
    assert judged("fallback<1.2x", one, none) == ["good"]  # one more than none is no change
    assert judged("fallback<1.2x", one, Behaviour(exits=99)) == ["unknown"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("speed>3", "speed is not known; expected one of fallback, offload, exit"),
        ("fallback", "expected conditions such as fallback<5%,agreement>0.97, got 'fallback'"),
        ("fallback<5ms", "expected a value such as 5%"),
        ("fallback<200%", "expected a value such as 5%, at most 1 or 100%"),
        ("latency<80", "expected a value such as 80ms"),
        ("agreement>1.1x", "agreement is not compared"),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused(text: str, told: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_health(text)
    assert told in str(refused.value)
