"""Roll-outs in the registry: each change is one transaction, so a kill leaves all of it or nothing.

Several servers may share a registry, and an operator may act at any moment. So a step of the loop
is kept only if the roll-out is still as it was when the step was made (`revision`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import (
    Connection,
    RowMapping,
    Select,
    and_,
    insert,
    or_,
    select,
    update,
)

from server.errors import ConflictError, UnknownRolloutError
from server.registry.catalogue import (
    fleets_wanted,
    locked_versions,
    set_active,
    set_fleet,
    wanted,
)
from server.registry.rollouts.records import (
    BACK,
    LIVE,
    Member,
    Order,
    Rollout,
    RolloutPlan,
    State,
)
from server.registry.schema import reports, rollout_members, rollouts
from server.registry.selection.selection import Selection
from server.registry.trail.events import printable
from server.registry.transactions import Transactions, acting, record

MAX_ROLLOUT: Final = 2**31 - 1  # of an integer column
MAX_TROUBLE: Final = 700
MAX_REASON: Final = 4_000
EVENTS: Final = {
    "share": "rollout.share",
    "done": "rollout.done",
    "failed": "rollout.back",
    "superseded": "rollout.superseded",
}


class Rollouts:
    """The roll-outs of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    # reading

    def now(self) -> float:
        """The registry's time, UTC seconds since 1970."""
        return self._transactions.now()

    def all(self) -> tuple[Rollout, ...]:
        """Every roll-out, newest first."""
        with self._transactions.reading() as connection:
            return _read(connection, select(rollouts))

    def of(self, rollout_id: int) -> Rollout:
        """The roll-out with that number.

        Raises: UnknownRolloutError.
        """
        with self._transactions.reading() as connection:
            return _need(connection, rollout_id)

    def members(self, rollout_id: int) -> tuple[Member, ...]:
        """The devices of a roll-out's share, by id."""
        query = select(rollout_members).where(rollout_members.c.rollout == rollout_id)
        with self._transactions.reading() as connection:
            rows = connection.execute(query.order_by(rollout_members.c.device)).mappings()
            return tuple(Member(**row) for row in rows)

    def to_step(self) -> tuple[Rollout, ...]:
        """Roll-outs for which something may be due: those live, standing, or on the way back."""
        waiting = select(rollout_members.c.rollout).where(
            rollout_members.c.returned_at.is_(None), rollout_members.c.before.is_not(None)
        )
        goes_back = and_(rollouts.c.state.in_(BACK), rollouts.c.id.in_(waiting))
        query = select(rollouts).where(
            or_(rollouts.c.state.in_(LIVE), rollouts.c.standing, goes_back)
        )
        with self._transactions.reading() as connection:
            return _read(connection, query)

    def orders(self, device_id: str | None = None) -> tuple[Order, ...]:
        """Orders of roll-outs to all devices, or to one, newest first."""
        back = and_(rollouts.c.state.in_(BACK), rollout_members.c.returned_at.is_(None))
        in_force = or_(rollouts.c.state.in_(LIVE), rollouts.c.standing, back)
        said = select(rollout_members).join(rollouts).where(in_force)
        if device_id is not None:
            said = said.where(rollout_members.c.device == device_id)
        with self._transactions.reading() as connection:
            rows = connection.execute(said).mappings().all()
            if not rows:
                return ()
            numbers = {row["rollout"] for row in rows}
            query = select(rollouts).where(rollouts.c.id.in_(numbers))
            found = {one.id: one for one in _read(connection, query)}
        orders = [Order(found[row["rollout"]], Member(**row)) for row in rows]
        return tuple(sorted(orders, key=lambda one: -one.rollout.id))

    # the operator

    def start(self, plan: RolloutPlan, base: int, *, who: str = "operator") -> Rollout:
        """Begin a roll-out; its first devices join with the loop's next step.

        Args:
            base: version that its fleets should run now.
        Raises: ConflictError if another one of the model is live in the same fleet, saying what to
            do.
        """
        now, who = self._transactions.now(), acting(who)
        with self._transactions.writing() as connection:
            locked_versions(connection, plan.model)
            live = select(rollouts).where(
                rollouts.c.model == plan.model, rollouts.c.state.in_(LIVE)
            )
            for other in _read(connection, live):
                _check_apart(plan.selection, other)
            row = {**_plan_row(plan), "base": base, "who": who, "started_at": now, "stage_at": now}
            row |= {"state": "running", "stage": 0, "standing": False, "reason": "", "revision": 0}
            number = connection.execute(insert(rollouts).returning(rollouts.c.id), row).scalar_one()
            record(connection, now, who, "rollout.start", f"{number} {plan} {plan.selection}")
            return _need(connection, number)

    def pause(self, rollout_id: int, *, who: str = "operator") -> Rollout:
        """Stop the growth and the judgement of a roll-out until `resume`.

        Raises: UnknownRolloutError; ConflictError unless it is running.
        """
        return self._turn(rollout_id, ("running",), "paused", "rollout.pause", who)

    def resume(self, rollout_id: int, *, who: str = "operator") -> Rollout:
        """Let a paused roll-out go on; its share is watched for the whole time again.

        Raises: UnknownRolloutError; ConflictError unless it is paused.
        """
        return self._turn(rollout_id, ("paused",), "running", "rollout.resume", who)

    def abort(self, rollout_id: int, *, who: str = "operator") -> Rollout:
        """End a roll-out: its devices go back to what they ran before.

        Raises: UnknownRolloutError; ConflictError if it has ended, saying what to do.
        """
        return self._turn(rollout_id, LIVE, "aborted", "rollout.abort", who)

    # the loop

    def apply(
        self,
        before: Rollout,
        after: Rollout,
        *,
        joined: Iterable[Member] = (),
        changed: Iterable[Member] = (),
        event: str = "",
    ) -> bool:
        """Keep a step of the loop, unless the roll-out was changed since it was read.

        A roll-out that is done makes its version the active one of the model, or that of its fleet,
        in the same transaction, unless its fleets were given another version meanwhile.

        Returns: whether the step is kept.
        """
        joined, changed = tuple(joined), tuple(changed)
        if after == before and not joined and not changed:
            return True
        now = self._transactions.now()
        ends = after.state == "done" and before.state != "done"
        with self._transactions.writing() as connection:
            if ends:
                locked_versions(connection, after.plan.model)
                if not after.standing and not _still_counts(connection, after, now):
                    return False
            this = and_(rollouts.c.id == before.id, rollouts.c.revision == before.revision)
            values = {**_state_row(after), "revision": before.revision + 1}
            if connection.execute(update(rollouts).where(this).values(values)).rowcount != 1:
                return False
            for member in joined:
                connection.execute(insert(rollout_members).values(_member_row(member)))
                _forget_refusal(connection, member.device, str(after.plan))
            for member in changed:
                row = _member_row(member)
                same = and_(
                    rollout_members.c.rollout == row.pop("rollout"),
                    rollout_members.c.device == row.pop("device"),
                )
                connection.execute(update(rollout_members).where(same).values(row))
            if joined:
                names = ", ".join(one.device for one in joined)
                detail = f"{after.id} {after.plan} share={100 * after.share:g}% {names}"
                record(connection, now, "server", "rollout.join", detail)
            if event:
                record(connection, now, "server", EVENTS[event], _told(after))
            if ends:
                _keep_version(connection, after, now)
            return True

    def _turn(
        self, rollout_id: int, allowed: Sequence[State], state: State, what: str, who: str
    ) -> Rollout:
        now, who = self._transactions.now(), acting(who)
        with self._transactions.writing() as connection:
            before = _need(connection, rollout_id, lock=True)
            if before.state not in allowed and not (state == "aborted" and before.standing):
                raise ConflictError(_why_not(before, state))
            values: dict[str, Any] = {"state": state, "revision": before.revision + 1}
            if state == "running":
                values |= {"watched_at": None}
            if state == "aborted":
                reason = f"{who} aborted it"
                values |= {"ended_at": now, "standing": False, "reason": reason}
            this = rollouts.c.id == rollout_id
            connection.execute(update(rollouts).where(this).values(values))
            record(connection, now, who, what, f"{rollout_id} {before.plan}")
            return _need(connection, rollout_id)


def _still_counts(connection: Connection, rollout: Rollout, now: float) -> bool:
    """Whether the roll-out is the newest order for its fleet, or for one of all, by now."""
    fleet = rollout.plan.selection.fleet
    fleets = fleets_wanted(connection, now) if fleet is None else wanted(connection, [fleet])
    return rollout.counts_for_any(fleets)


def _keep_version(connection: Connection, rollout: Rollout, now: float) -> None:
    """Make the version of a roll-out that is done the one that its fleets should run."""
    plan, chosen = rollout.plan, rollout.plan.selection
    if rollout.standing:
        return
    if chosen.fleet is None:
        set_active(connection, plan.model, plan.version, now, "server")
    else:
        set_fleet(connection, chosen.fleet, (plan.model, plan.version), now, "server")


def _forget_refusal(connection: Connection, device: str, version: str) -> None:
    """Forget that a device refused the version: it is asked again, and what it says then counts."""
    of_version = reports.c.refused.startswith(f"{version}/", autoescape=True)
    connection.execute(
        update(reports)
        .where(reports.c.device == device, of_version)
        .values(refused=None, why=None, refused_at=None)
    )


def _check_apart(chosen: Selection, other: Rollout) -> None:
    """Raises: ConflictError if a live roll-out may move the same devices."""
    theirs = other.plan.selection
    if chosen.fleet is not None and theirs.fleet is not None and chosen.fleet != theirs.fleet:
        return
    raise ConflictError(
        f"{other.plan.model}: roll-out {other.id} of {other.plan} ({theirs}) is {other.state}, and"
        " one at a time moves the devices of a fleet; wait for its end, or run `splitedge server"
        f" rollout abort {other.id}`"
    )


def _why_not(rollout: Rollout, state: State) -> str:
    """Why a roll-out cannot be put into a state, and what to do."""
    about = f"roll-out {rollout.id} of {rollout.plan}"
    if rollout.state == "done" and state == "aborted":
        fleet = rollout.plan.selection.fleet
        undo = (
            f"`splitedge server models activate {rollout.plan.model}/{rollout.base}`"
            if fleet is None
            else f"`splitedge server models assign {fleet} {rollout.plan.model}/{rollout.base}`"
        )
        return f"{about} is done; to go back, run {undo}"
    if not rollout.live:
        return f"{about} has ended: {rollout.state}; start another one"
    return f"{about} is {rollout.state} already"


def _told(rollout: Rollout) -> str:
    share = f" share={100 * rollout.share:g}%" if rollout.live else ""
    reason = f" {rollout.reason}" if rollout.reason else ""
    return printable(f"{rollout.id} {rollout.plan}{share}{reason}", MAX_REASON)


def _read(connection: Connection, query: Select[Any]) -> tuple[Rollout, ...]:
    rows = connection.execute(query.order_by(rollouts.c.id.desc())).mappings()
    return tuple(_rollout(row) for row in rows)


def _need(connection: Connection, rollout_id: int, *, lock: bool = False) -> Rollout:
    query = select(rollouts).where(rollouts.c.id == rollout_id)
    # another number is not looked up: a database may refuse it
    can_be = 1 <= rollout_id <= MAX_ROLLOUT
    found = _read(connection, query.with_for_update() if lock else query) if can_be else ()
    if not found:
        known = connection.scalars(select(rollouts.c.id).order_by(rollouts.c.id.desc()).limit(10))
        listed = ", ".join(map(str, known)) or "none"
        raise UnknownRolloutError(f"roll-out {rollout_id}: unknown; the newest are {listed}")
    return found[0]


def _rollout(row: RowMapping) -> Rollout:
    plan = RolloutPlan(
        row["model"],
        row["version"],
        Selection(row["fleet"], row["tag"], row["device"]),
        tuple(row["shares"]),
        row["health"],
        row["wait_s"],
        row["answers_min"],
        row["failures_max"],
    )
    names = ["id", "base", "state", "stage", "started_at", "stage_at", "who", "watched_at"]
    names += ["ended_at", "standing", "reason", "revision"]
    return Rollout(plan=plan, **{name: row[name] for name in names})


def _plan_row(plan: RolloutPlan) -> dict[str, Any]:
    chosen = plan.selection
    row = {name: getattr(plan, name) for name in ("model", "version", "health", "wait_s")}
    row |= {"answers_min": plan.answers_min, "failures_max": plan.failures_max}
    row |= {"fleet": chosen.fleet, "tag": chosen.tag, "device": chosen.device}
    return {**row, "shares": list(plan.shares)}


def _state_row(rollout: Rollout) -> dict[str, Any]:
    names = ("state", "stage", "stage_at", "watched_at", "ended_at", "standing")
    reason = printable(rollout.reason, MAX_REASON)
    return {**{name: getattr(rollout, name) for name in names}, "reason": reason}


def _member_row(member: Member) -> dict[str, Any]:
    names = ("rollout", "device", "stage", "before", "joined_at", "taken_at", "returned_at")
    trouble = printable(member.trouble, MAX_TROUBLE)
    return {**{name: getattr(member, name) for name in names}, "trouble": trouble}
