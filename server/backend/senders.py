"""Accounts of senders: what each device sent and got, and token buckets that limit it.

A sender is a device, a key, the operator, or the address of an anonymous client on loopback. The
accounts of the last SENDERS_MAX senders are kept, so memory is bounded as devices come and go.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final

from edge_sdk.checks import check_fields
from profiles.checks import number, optional
from server.errors import ExpiredError, OverloadedError, ServerError

if TYPE_CHECKING:
    from edge_sdk.session import Array

SENDERS_MAX: Final = 10_000
# a sender that was idle may send what it may send in so many seconds, at once
BURST_S: Final = 1.0
# A sender whose query the full queue refused is refused without a look at its queries for so much
# of the time in which the queue empties: short enough that the engine never runs out of work.
CLOSED_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Limits of each sender, per second; None for no limit.

    Attributes:
        requests: queries. rows: their samples. bytes: of their messages.
    """

    requests: float | None = None
    rows: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            "limit",
            requests=optional(number(above=0)),
            rows=optional(number(above=0)),
            bytes=optional(number(above=0)),
        )


@dataclass(slots=True)
class SenderCounts:
    """Counts of a sender since the server started, or since its account was forgotten.

    Attributes:
        requests, rows, bytes: what arrived; rows of the queries that could be read.
        answered: queries with an answer. limited: refused by a limit. refused: by the full queue,
            or because the deadline would have passed there. expired: too late. failed: others.
    """

    requests: int = 0
    rows: int = 0
    bytes: int = 0
    answered: int = 0
    limited: int = 0
    refused: int = 0
    expired: int = 0
    failed: int = 0

    def add(self, other: SenderCounts) -> None:
        """Add the counts of another sender."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class TokenBucket:
    """Tokens that fill up at `rate` a second, up to BURST_S of them, and at least one.

    A cost above what the bucket holds needs a full bucket, and leaves a debt.
    """

    __slots__ = ("_filled_at", "_level", "_most", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._most = max(1.0, rate * BURST_S)
        self._level = self._most
        self._filled_at = now

    def wait_s(self, cost: float, now: float) -> float:
        """Seconds until that many tokens can be taken; 0 for now."""
        self._level = min(self._most, self._level + (now - self._filled_at) * self.rate)
        self._filled_at = now
        return max(0.0, min(cost, self._most) - self._level) / self.rate

    def take(self, cost: float) -> None:
        """Take tokens, after `wait_s` said that it may be now."""
        self._level -= cost


@dataclass(slots=True)
class _Account:
    limits: SenderLimits
    buckets: Mapping[str, TokenBucket]
    counts: SenderCounts = field(default_factory=SenderCounts)
    closed_until: float = 0.0
    retry_after_s: float = 0.0  # as the queue said


class Senders:
    """The accounts; safe from any thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limits: SenderLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = SenderLimits() if limits is None else limits
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._forgotten = SenderCounts()

    def limit(self, sender: str, own: SenderLimits) -> None:
        """Give a sender limits of its own; where one is None, that of all senders holds."""
        limits = SenderLimits(
            own.requests or self._limits.requests,
            own.rows or self._limits.rows,
            own.bytes or self._limits.bytes,
        )
        with self._lock:
            account = self._account(sender)
            if account.limits != limits:
                account.limits, account.buckets = limits, _buckets(limits, self._clock())

    def arrived(self, sender: str, size_bytes: int) -> None:
        """Count a message before it is read.

        Raises: OverloadedError if the sender's requests or bytes are above their limit, or if the
            queue refused a query of this sender just now.
        """
        with self._lock:
            account = self._account(sender)
            self._check_open(account, size_bytes)
            account.counts.requests += 1
            account.counts.bytes += size_bytes
            self._take(sender, account, {"requests": 1, "bytes": size_bytes})

    def arrived_more(self, sender: str, size_bytes: int) -> None:
        """Count bytes of a message that did not say its length before, once they are read.

        They may leave a debt, for which the sender's next message waits.
        """
        with self._lock:
            account = self._account(sender)
            account.counts.bytes += size_bytes
            bucket = account.buckets.get("bytes")
            if bucket is not None:
                bucket.wait_s(0, self._clock())  # what filled up until now
                bucket.take(size_bytes)

    def refuse_early(self, sender: str, size_bytes: int) -> None:
        """Count a message only if it is refused before anything of it is looked at.

        Raises: OverloadedError if the queue refused a query of this sender just now.
        """
        with self._lock:
            account = self._accounts.get(sender)
            if account is not None:
                self._check_open(account, size_bytes)

    def read(self, sender: str, rows: int) -> None:
        """Count the samples of a query.

        Raises: OverloadedError if the sender's samples are above their limit.
        """
        with self._lock:
            account = self._account(sender)
            account.counts.rows += rows
            self._take(sender, account, {"rows": rows})

    def turned_away(self, sender: str) -> None:
        """Count a query that was refused before the queue saw it; the next one may pass."""
        with self._lock:
            self._account(sender).counts.refused += 1

    def settled(self, sender: str, outcome: Array | ServerError) -> None:
        """Count the outcome of a query that no limit refused."""
        with self._lock:
            account = self._account(sender)
            counts = account.counts
            if not isinstance(outcome, ServerError):
                counts.answered += 1
            elif isinstance(outcome, OverloadedError):
                counts.refused += 1
                account.retry_after_s = outcome.retry_after_s or 0.0
                account.closed_until = self._clock() + CLOSED_SHARE * account.retry_after_s
            elif isinstance(outcome, ExpiredError):
                counts.expired += 1
            else:
                counts.failed += 1

    def counts(self) -> dict[str, SenderCounts]:
        """A copy of all counts, by sender."""
        with self._lock:
            return {
                sender: replace(self._accounts[sender].counts) for sender in sorted(self._accounts)
            }

    def totals(self) -> SenderCounts:
        """The sums over all senders since the server started, forgotten ones included."""
        with self._lock:
            total = replace(self._forgotten)
            all_counts = [account.counts for account in self._accounts.values()]
        for counts in all_counts:
            total.add(counts)
        return total

    def _account(self, sender: str) -> _Account:
        account = self._accounts.get(sender)
        if account is None:
            buckets = _buckets(self._limits, self._clock())
            account = self._accounts[sender] = _Account(self._limits, buckets)
            if len(self._accounts) > SENDERS_MAX:
                self._forgotten.add(self._accounts.popitem(last=False)[1].counts)
        else:
            self._accounts.move_to_end(sender)
        return account

    def _check_open(self, account: _Account, size_bytes: int) -> None:
        if self._clock() >= account.closed_until:
            return
        account.counts.requests += 1
        account.counts.bytes += size_bytes
        account.counts.refused += 1
        raise OverloadedError(
            "the queue is full of this sender's queries, answer locally",
            retry_after_s=account.retry_after_s,
        )

    def _take(self, sender: str, account: _Account, costs: Mapping[str, int]) -> None:
        """Take from all buckets, or from none."""
        if not account.buckets:
            return
        now = self._clock()
        buckets = [(what, account.buckets[what]) for what in costs if what in account.buckets]
        for what, bucket in buckets:
            wait_s = bucket.wait_s(costs[what], now)
            if wait_s > 0:
                account.counts.limited += 1
                raise OverloadedError(
                    f"{sender}: expected at most {bucket.rate:g} {what} a second; answer"
                    f" locally, and ask again in {wait_s:.2f} s",
                    retry_after_s=wait_s,
                )
        for what, bucket in buckets:
            bucket.take(costs[what])


def _buckets(limits: SenderLimits, now: float) -> dict[str, TokenBucket]:
    """The buckets of what is limited."""
    rates = {"requests": limits.requests, "rows": limits.rows, "bytes": limits.bytes}
    return {what: TokenBucket(rate, now) for what, rate in rates.items() if rate is not None}
