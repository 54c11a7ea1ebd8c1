"""Sources of a gate's threshold, for users who do not set it as a number.

    from_curve            the bundle's operating curve, measured on held-out data at export
    BudgetController      label-free: offloads no more than a rate, bandwidth or energy allows
    AgreementController   label-free: exits no more than agrees with the server, with confidence

Pure, apart from a clock and a seeded random stream; memory is bounded. Any thread may read
`threshold`; a controller's other methods need one thread at a time.
docs/decisions/0002-label-free-thresholds.md says why these and not others.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Literal

from edge_sdk.checks import check_value, need
from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import GatePoint
from edge_sdk.settings import AUDIT_WINDOW, check_agreement, check_budget
from profiles.checks import number, whole

# With fewer uncertainties their upper tail is too uncertain.
WARM_UP: Final = 32
# Predictions over which the rate of a budget per second is averaged.
PACE: Final = 64
# Audits between two choices of the threshold; a choice takes about 0.2 ms.
REVIEW_EVERY: Final = 25


def from_curve(
    curve: Sequence[GatePoint],
    *,
    min_accuracy: float | None = None,
    min_exit_accuracy: float | None = None,
    min_exit_rate: float | None = None,
) -> float:
    """The threshold of the point on the operating curve that meets one goal. Give exactly one.

    Args:
        min_accuracy: of the gated pair; takes the point of highest exit rate that reaches it.
        min_exit_accuracy: of the exits; takes the point of highest exit rate that reaches it.
        min_exit_rate: takes the lowest threshold at which at least this share exits.
    Raises: ConfigurationError if no point reaches the goal (naming the best point), if the bundle
        has no curve, or if not exactly one goal is given.
    """
    goals = {
        "accuracy": min_accuracy,
        "exit_accuracy": min_exit_accuracy,
        "exit_rate": min_exit_rate,
    }
    given = [(name, least) for name, least in goals.items() if least is not None]
    if len(given) != 1:
        raise ConfigurationError(
            f"from_curve: expected one of {', '.join(f'min_{name}' for name in goals)},"
            f" got {len(given)}"
        )
    if not curve:
        raise ConfigurationError(
            "from_curve: this bundle has no operating curve; export it again with held-out data"
            " or set the threshold itself"
        )
    name, least = given[0]
    reached = [point for point in curve if getattr(point, name) >= least]
    if not reached:
        best = max(curve, key=lambda point: _or_lowest(getattr(point, name)))
        raise ConfigurationError(
            f"from_curve: expected a point with {name} of at least {least:g}, the best is"
            f" {getattr(best, name):g} at threshold {best.threshold:g}; lower the goal or retrain"
        )
    if name == "exit_rate":
        return min(point.threshold for point in reached)
    return max(reached, key=lambda point: (point.exit_rate, -point.threshold)).threshold


def grid_from_curve(curve: Sequence[GatePoint], size: int = 10) -> tuple[float, ...]:
    """At most `size` thresholds of the curve, ascending, about evenly spaced in exit rate.

    A grid for `AgreementController`, which needs it fixed before the first audit.

    Raises: ConfigurationError if nothing exits anywhere on the curve.
    """
    most = max((point.exit_rate for point in curve), default=0.0)
    if not most > 0:
        raise ConfigurationError("grid_from_curve: expected a curve on which something exits")
    rates = (most * step / size for step in range(1, size + 1))
    return tuple(sorted({from_curve(curve, min_exit_rate=rate) for rate in rates}))


class BudgetController:
    """Keeps offloads under a limit, and spends the limit on the most uncertain queries.

    A token bucket sets the level of a streaming quantile. Each prediction (or each second) earns
    limit / cost tokens, an offload spends one, `burst` is the most that can be saved. The threshold
    is the quantile of the last `window` uncertainties above which lies the share

        rate * tokens / (burst - tokens),    rate = tokens earned a prediction

    so a half full bucket offloads just what it earns, a full one everything, and one with less
    than a token nothing. Hence, for any stream, with drift, ties or an adversary: the offloads in
    any span are at most what the span earns plus `burst`, and with the default floor and a limit
    per prediction at least what it earns less `burst`. A nan is offloaded at every threshold; what
    it overdraws is earned back before anything else is offloaded. It is the integral control of
    adaptive conformal inference (Gibbs and Candès, 2021) with its integral bounded.

    Args:
        limit: per prediction or per second, in the unit of `cost`: a rate in [0, 1] with the
            default cost, else bytes or joules.
        cost: of one offload: 1 to limit the number, else its bytes (frame and overhead) or joules.
        per: whether the limit holds per prediction or per second.
        start: the threshold until 32 uncertainties have been seen: the bundle's.
        floor: an uncertainty below it is never offloaded, even within the budget; for example the
            bundle's threshold. -inf spends the whole budget.
        burst: offloads that may come at once.
        window: uncertainties that are remembered.
    Raises: ConfigurationError for a value outside its range.
    """

    __slots__ = (
        "_burst",
        "_clock",
        "_cost",
        "_earned",
        "_floor",
        "_income",
        "_last_s",
        "_limit",
        "_offloads",
        "_per_second",
        "_ranked",
        "_rate",
        "_recent",
        "_seen",
        "_start",
        "_threshold",
        "_tokens",
    )

    def __init__(
        self,
        limit: float,
        *,
        start: float,
        cost: float = 1.0,
        per: Literal["prediction", "second"] = "prediction",
        floor: float = -math.inf,
        burst: float = 50.0,
        window: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_budget(limit=limit, cost=cost, per=per, floor=floor)
        check_value("burst", burst, number(least=2))
        check_value("window", window, whole(WARM_UP))
        check_value("start", start, number(infinite=True))
        self._limit, self._cost = limit, cost
        self._income = limit / cost
        self._earned = 0.0
        self._offloads = 0
        self._per_second = per == "second"
        self._start = start
        self._floor = floor
        self._burst = burst
        self._clock = clock
        self._last_s: float | None = None
        self._rate = 0.0 if self._per_second else self._income
        self._seen = 0
        self._tokens = burst / 2 if limit else 0.0
        self._recent: deque[float] = deque(maxlen=window)
        self._ranked: list[float] = []
        self._threshold = self._choose()

    @property
    def threshold(self) -> float:
        """The threshold for the next prediction, in the policy's unit; inf without budget."""
        return self._threshold

    def observe(self, uncertainty: float) -> None:
        """Count a prediction that was decided at `threshold`; nan counts as the most uncertain.

        Takes about 3 us.
        """
        self._earn()
        if not uncertainty < self._threshold:
            self._tokens -= 1.0
            self._offloads += 1
        self._remember(math.inf if math.isnan(uncertainty) else uncertainty)
        self._threshold = self._choose()

    def report(self) -> BudgetReport:
        """Income and spending so far."""
        per: Literal["prediction", "second"] = "second" if self._per_second else "prediction"
        earned, spent = self._cost * self._earned, self._cost * self._offloads
        return BudgetReport(self._limit, per, earned, spent)

    def _earn(self) -> None:
        tokens = self._income
        if self._per_second:
            now_s = self._clock()
            tokens *= 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
            self._last_s = now_s
            # a plain mean at first, then a moving average
            self._rate += (tokens - self._rate) / min(max(self._seen, 1), PACE)
            self._seen += 1
        self._earned += tokens
        self._tokens = min(self._tokens + tokens, self._burst)

    def _remember(self, uncertainty: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._ranked[bisect_left(self._ranked, self._recent[0])]
        self._recent.append(uncertainty)
        insort(self._ranked, uncertainty)

    def _choose(self) -> float:
        if self._tokens < 1.0:
            return math.inf
        if len(self._ranked) < WARM_UP:
            return max(self._start, self._floor)
        wanted = self._rate * self._tokens
        spare = self._burst - self._tokens
        if wanted >= spare:  # a share of 1
            return self._floor
        above = int(wanted / spare * len(self._ranked))
        if above == 0:  # a share finer than the window: only what exceeds all of it
            return max(math.nextafter(self._ranked[-1], math.inf), self._floor)
        return max(self._ranked[-above], self._floor)


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """Income and spending of a `BudgetController` since its start, in the unit of its cost.

    Attributes:
        limit, per: the settings.
        earned: the limit times the predictions, or the seconds, so far.
        spent: the cost of an offload times the predictions that the gate did not let exit.
    """

    limit: float
    per: Literal["prediction", "second"]
    earned: float
    spent: float


@dataclass(frozen=True, slots=True)
class AgreementReport:
    """The threshold that an `AgreementController` chose, and the audits behind the choice.

    Attributes:
        threshold: in force now; -inf while no threshold of the grid holds.
        bound: upper bound of the disagreement among exits at that threshold; None while none holds.
        delta, confidence: the settings.
        audits: audits in memory; `exits` of them lie below the threshold, and for `disagreements`
            of those exits the server gave another label.
    """

    threshold: float
    bound: float | None
    delta: float
    confidence: float
    audits: int
    exits: int
    disagreements: int


class AgreementController:
    """Exits as much as agrees with the server: the loosest threshold of a fixed grid at which, with
    confidence, the server would give another label for at most a share `delta` of the exits.

    Call `wants_audit` for every query, exit or not. When it returns True, get the server's answer
    even if the gate exits (in the background: the user has the device's answer already) and report
    it with `record_audit`; drop an audit without a reply. All queries have the same chance, so the
    audits are a plain sample of the traffic, and those below a threshold are a plain sample of its
    exits: their disagreements are binomial and the Clopper-Pearson bound is exact. While no
    threshold holds everything is offloaded, so every query is an audit at no cost, and the first
    choice comes after ln((1 - confidence) / len(grid)) / ln(1 - delta) queries at best, rounded up
    to a multiple of 25.

    Several thresholds are tested, so each is tested at (1 - confidence) / len(grid) (Bonferroni).
    A test in fixed order, strictest first, would need no such division, but stops at its first
    failure, and the strictest threshold has the fewest audits to pass with. The cost is small: with
    10 thresholds 1.8 times the audits for the first choice. There is no assumption about how
    disagreement grows with uncertainty.

    The guarantee: at any one moment, the threshold in force exceeds delta with probability at most
    1 - confidence over the audits. It does not hold for all moments at once, and it is about the
    traffic of the last `window` audits: a change is followed only as they are replaced. Agreement
    is with the server; errors of the server stay unseen.

    Args:
        delta: tolerated disagreement among exits, in (0, 1).
        grid: thresholds, in the policy's unit, fixed before any audit: `grid_from_curve`.
        confidence: in (0, 1).
        audit_share: share of the queries to audit, in (0, 1].
        window: audits that are remembered.
        seed: of the random choice of audits.
    Raises: ConfigurationError for a value outside its range, or a window too small for any
        threshold ever to hold.
    """

    __slots__ = (
        "_audits",
        "_bins",
        "_coin",
        "_confidence",
        "_delta",
        "_grid",
        "_report",
        "_share",
        "_since_review",
    )

    def __init__(
        self,
        delta: float,
        grid: Sequence[float],
        *,
        confidence: float = 0.95,
        audit_share: float = 0.02,
        window: int = AUDIT_WINDOW,
        seed: int = 0,
    ) -> None:
        rises = all(low < high for low, high in pairwise(grid))
        finite = all(map(math.isfinite, grid))
        need(bool(grid) and rises and finite, "grid", "finite thresholds, ascending", grid)
        check_agreement(
            delta=delta,
            confidence=confidence,
            audit_share=audit_share,
            thresholds=len(grid),
            window=window,
        )
        self._delta = delta
        self._grid = tuple(grid)
        self._confidence = confidence
        self._share = audit_share
        self._coin = random.Random(seed)  # noqa: S311  which queries are audited is no secret
        # the last bin counts audits that exit at no threshold of the grid
        self._bins = [[0, 0] for _ in range(len(grid) + 1)]
        self._audits: deque[tuple[int, bool]] = deque(maxlen=window)
        self._since_review = 0
        self._report = AgreementReport(-math.inf, None, delta, confidence, 0, 0, 0)

    @property
    def threshold(self) -> float:
        """The threshold for the next prediction; -inf (offload everything) while none holds."""
        return self._report.threshold

    @property
    def bound(self) -> float | None:
        """Upper bound of the disagreement among exits at `threshold`; None while none holds."""
        return self._report.bound

    def wants_audit(self) -> bool:
        """Whether to compare the next query with the server's answer: with probability
        `audit_share`, or always while no threshold holds and everything is offloaded anyway.

        It takes no decision: a choice that depends on the uncertainty would bias the sample.
        """
        return self._report.bound is None or self._coin.random() < self._share

    def record_audit(self, uncertainty: float, agreed: bool) -> None:
        """Count one audit: the query's uncertainty, and whether the server gave the device's label.

        Every 25th audit chooses the threshold again.
        """
        if len(self._audits) == self._audits.maxlen:
            index, disagreed = self._audits[0]
            self._bins[index][0] -= 1
            self._bins[index][1] -= disagreed
        # bin i: grid[i - 1] <= uncertainty < grid[i]; nan comes last
        index = bisect_right(self._grid, uncertainty)
        self._audits.append((index, not agreed))
        self._bins[index][0] += 1
        self._bins[index][1] += not agreed
        self._since_review += 1
        if self._since_review == REVIEW_EVERY:
            self._since_review = 0
            self._report = self._review()

    def report(self) -> AgreementReport:
        """The threshold in force and the audits behind it."""
        return self._report

    def _review(self) -> AgreementReport:
        confidence = 1 - (1 - self._confidence) / len(self._grid)
        exits = list(accumulate(trials for trials, _ in self._bins))
        disagreements = list(accumulate(count for _, count in self._bins))
        threshold, bound, trials, failures = -math.inf, None, 0, 0
        for index in reversed(range(len(self._grid))):
            if _holds(disagreements[index], exits[index], self._delta, confidence):
                threshold = self._grid[index]
                trials, failures = exits[index], disagreements[index]
                bound = upper_bound(failures, trials, confidence)
                break
        return AgreementReport(
            threshold=threshold,
            bound=bound,
            delta=self._delta,
            confidence=self._confidence,
            audits=len(self._audits),
            exits=trials,
            disagreements=failures,
        )


def upper_bound(failures: int, trials: int, confidence: float) -> float:
    """The exact (Clopper-Pearson) one-sided upper bound of a probability: the p at which `failures`
    or fewer in `trials` have probability 1 - confidence.

    Equals the beta quantile at `confidence` with parameters failures + 1 and trials - failures.
    Found by bisection of the binomial sum, to the last bits. Without trials: 1.
    """
    if failures >= trials:
        return 1.0
    low, high = failures / trials, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        if _at_most(failures, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _holds(failures: int, trials: int, delta: float, confidence: float) -> bool:
    """Whether `upper_bound` is at most delta, without computing it."""
    return failures < trials and _at_most(failures, trials, delta) <= 1 - confidence


def _at_most(failures: int, trials: int, p: float) -> float:
    """P(X <= failures) for X binomial; 0 < p < 1. Logarithms keep large `trials` from overflow."""
    odds, base = math.log(p) - math.log1p(-p), trials * math.log1p(-p)
    choices = math.lgamma(trials + 1)
    return math.fsum(
        math.exp(base + k * odds + choices - math.lgamma(k + 1) - math.lgamma(trials - k + 1))
        for k in range(failures + 1)
    )


def _or_lowest(value: float) -> float:
    """`value` for a comparison: nan, the exit accuracy where nothing exits, ranks lowest."""
    return -math.inf if math.isnan(value) else value
