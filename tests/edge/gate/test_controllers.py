"""Thresholds from the curve, by budget and by agreement: are the limits and confidences kept?"""

import math
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.errors import ConfigurationError
from edge_sdk.gate.controllers import (
    AgreementController,
    BudgetController,
    from_curve,
    grid_from_curve,
    upper_bound,
)
from edge_sdk.gate.gate import Gate, entropy
from edge_sdk.manifest import GatePoint

# threshold, exit rate, exit accuracy, accuracy of the pair
CURVE = (
    GatePoint(0.05, 0.20, 0.99, 0.96),
    GatePoint(0.20, 0.50, 0.97, 0.97),
    GatePoint(0.80, 0.80, 0.93, 0.95),
    GatePoint(1.60, 1.00, 0.88, 0.88),
)


# --- from the operating curve


def test_an_accuracy_is_kept_at_the_highest_exit_rate() -> None:
    assert from_curve(CURVE, min_accuracy=0.95) == 0.80
    assert from_curve(CURVE, min_accuracy=0.965) == 0.20
    assert from_curve(CURVE, min_exit_accuracy=0.93) == 0.80
    assert from_curve(CURVE, min_exit_accuracy=0.98) == 0.05


def test_an_exit_rate_is_reached_at_the_lowest_threshold() -> None:
    assert from_curve(CURVE, min_exit_rate=0.0) == 0.05
    assert from_curve(CURVE, min_exit_rate=0.5) == 0.20
    assert from_curve(CURVE, min_exit_rate=0.51) == 0.80


def test_of_equal_exit_rates_the_stricter_threshold_is_taken() -> None:
    twin = replace(CURVE[2], threshold=0.9)
    assert from_curve((twin, *CURVE), min_accuracy=0.95) == 0.80


def test_an_unreachable_wish_names_the_best_there_is() -> None:
    empty = GatePoint(0.0, 0.0, math.nan, 0.94)
    with pytest.raises(ConfigurationError, match=r"accuracy of at least 0.98, the best is 0.97 at"):
        from_curve(CURVE, min_accuracy=0.98)
    with pytest.raises(ConfigurationError, match=r"the best is 0.99 at threshold 0.05"):
        from_curve((empty, *CURVE), min_exit_accuracy=0.999)


def test_exactly_one_wish_is_taken() -> None:
    with pytest.raises(ConfigurationError, match="got 0"):
        from_curve(CURVE)
    with pytest.raises(ConfigurationError, match="got 2"):
        from_curve(CURVE, min_accuracy=0.9, min_exit_rate=0.1)
    with pytest.raises(ConfigurationError, match="no operating curve"):
        from_curve((), min_accuracy=0.9)


def test_a_grid_is_spread_over_the_exit_rates() -> None:
    # rates 1/4, 2/4, 3/4, 1 are first reached at these
    assert grid_from_curve(CURVE, 4) == (0.20, 0.80, 1.60)
    assert grid_from_curve(CURVE, 1) == (1.60,)
    with pytest.raises(ConfigurationError, match="something exits"):
        grid_from_curve([GatePoint(0.1, 0.0, 0.0, 0.9)])


# --- by budget


def offloads(budget: BudgetController, stream: Iterable[float]) -> list[bool]:
    """What a gate under `budget` offloads of a stream of uncertainties."""
    sent = []
    for uncertainty in stream:
        sent.append(not uncertainty < budget.threshold)
        budget.observe(uncertainty)
    return sent


def largest_excess(sent: Iterable[bool], earned: float) -> float:
    """Over all spans of the stream, the most offloads above what the span earned."""
    worst = lead = 0.0
    for one in sent:
        lead = max(lead, 0.0) + one - earned
        worst = max(worst, lead)
    return worst


def streams(n: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    noise = rng.exponential(0.3, n)
    third = n // 3
    return {
        "steady": noise.tolist(),
        "rising six decades": (noise * np.logspace(-6, 0, n)).tolist(),
        "falling six decades": (noise * np.logspace(0, -6, n)).tolist(),
        "jumps": np.concatenate([noise[:third] * 0.01, noise[third:]]).tolist(),
        "half tied at the top": np.where(rng.random(n) < 0.5, 2.0, noise / 10).tolist(),
        "constant": [0.0] * n,
        "nan now and then": np.where(rng.random(n) < 0.01, np.nan, noise).tolist(),
    }


@pytest.mark.parametrize("limit", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", streams(3))
def test_offloads_stay_within_a_burst_of_the_limit_on_every_stream(name: str, limit: float) -> None:
    n, burst = 9000, 50
    sent = offloads(BudgetController(limit, start=0.4, burst=burst), streams(n)[name])
    assert largest_excess(sent, limit) <= burst
    # and the budget is used: the opposite sums are bounded too
    assert largest_excess((not one for one in sent), 1 - limit) <= burst
    # so over the whole stream the rate is within 50 / 9000 = 0.6 % of the limit
    assert abs(sum(sent) / n - limit) <= burst / n


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(0, 3) | st.sampled_from([0.0, 1.0]), max_size=400),
    limit=st.floats(0, 1),
    burst=st.floats(2, 20),
)
def test_no_stream_breaks_the_limit(values: list[float], limit: float, burst: float) -> None:
    budget = BudgetController(limit, start=0.0, burst=burst, window=32)
    # 1e-9 for 400 additions of floats
    assert largest_excess(offloads(budget, values), limit) <= burst + 1e-9


def test_queries_that_no_threshold_stops_are_paid_for_by_those_after_them() -> None:
    budget = BudgetController(0.1, start=0.4, burst=10)
    # nan leaves at any threshold: 5 tokens and 30 * 0.1 earned, 30 spent
    assert all(offloads(budget, [math.nan] * 30))
    # 22 overdrawn and one to spend are 230 predictions at a tenth each, one less for the rounding
    sent = offloads(budget, [1.0] * 400)
    assert not any(sent[:229])
    # then some leave again: 43 earned and 5 saved, less the 30 that left and at most 10 saved
    assert 8 <= sum(sent) <= 18


def test_an_opponent_who_knows_the_threshold_cannot_break_the_limit() -> None:
    budget = BudgetController(0.1, start=0.4)
    sent = []
    for _ in range(5000):
        uncertainty = budget.threshold if math.isfinite(budget.threshold) else 1.0
        sent.append(not uncertainty < budget.threshold)
        budget.observe(uncertainty)
    assert largest_excess(sent, 0.1) <= 50


def test_the_most_uncertain_queries_are_those_that_leave() -> None:
    values = np.array(streams(20000)["steady"])
    sent = np.array(offloads(BudgetController(0.1, start=0.4), values.tolist()))
    best = np.sort(values)[-int(sent.sum()) :]
    # a random tenth would have 0.3, the best tenth 0.3 * (1 + ln 10) = 0.99
    assert values[sent].mean() >= 0.97 * best.mean()


def test_the_threshold_follows_the_quantile_through_a_drift() -> None:
    rng = np.random.default_rng(1)
    budget = BudgetController(0.2, start=0.4)
    for scale in (1.0, 1e-4, 30.0):
        offloads(budget, (rng.exponential(scale, 3000)).tolist())
        seen = []
        for value in rng.exponential(scale, 1000).tolist():
            seen.append(budget.threshold)
            budget.observe(value)
        # the exponential's upper 20 % begin at ln 5; the tokens move it about that
        assert np.median(seen) == pytest.approx(scale * math.log(5), rel=0.1)


@pytest.mark.parametrize("name", ["steady", "half tied at the top"])
def test_bytes_a_prediction_are_limited_through_the_cost_of_an_offload(name: str) -> None:
    stream = streams(5000)[name]
    # 400 of 8000 bytes: one in twenty
    by_bytes = offloads(BudgetController(400, cost=8000, start=0.4), stream)
    assert by_bytes == offloads(BudgetController(0.05, start=0.4), stream)


def test_bytes_a_second_hold_while_the_pace_changes() -> None:
    rng = np.random.default_rng(2)
    now_s, spent = 0.0, 0
    budget = BudgetController(
        10_000, cost=2000, per="second", start=0.4, burst=20, clock=lambda: now_s
    )
    for pace_s in (0.01, 0.5, 0.002):  # 100, 2 and 500 predictions a second, 100 s of each
        before, began_s = spent, now_s
        while now_s < began_s + 100:
            now_s += rng.exponential(pace_s)
            uncertainty = rng.exponential()
            spent += 2000 * (not uncertainty < budget.threshold)
            budget.observe(uncertainty)
        allowed = 10_000 * (now_s - began_s)
        assert spent - before <= allowed + 20 * 2000
        # 5 offloads a second are allowed: at 2 predictions a second all leave
        most = min(allowed, 2000 * (now_s - began_s) / pace_s)
        assert spent - before >= 0.85 * most


def test_a_clock_that_stands_still_earns_nothing() -> None:
    budget = BudgetController(1.0, cost=1.0, per="second", start=0.0, burst=10, clock=lambda: 7.0)
    # the bucket starts half full
    assert sum(offloads(budget, [1.0] * 100)) == 5


def test_answers_surer_than_the_floor_never_leave() -> None:
    values = streams(5000)["steady"]
    sent = offloads(BudgetController(0.9, start=0.4, floor=0.4), values)
    assert sent == [value >= 0.4 for value in values]


def test_the_first_predictions_use_the_threshold_they_are_given() -> None:
    budget = BudgetController(0.5, start=0.4)
    assert budget.threshold == 0.4
    offloads(budget, [0.1] * 31)
    assert budget.threshold == 0.4
    budget.observe(0.1)
    assert budget.threshold != 0.4


def test_limits_of_nothing_and_of_everything() -> None:
    values = streams(300)["steady"]
    assert not any(offloads(BudgetController(0.0, start=0.0), values))
    assert all(offloads(BudgetController(1.0, start=0.0), values))


def _memory_growth(step: Callable[[float], None], values: list[float]) -> int:
    tracemalloc.start()
    try:
        for value in values[: len(values) // 2]:
            step(value)
        before, _ = tracemalloc.get_traced_memory()
        for value in values[len(values) // 2 :]:
            step(value)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


def test_memory_of_the_controllers_does_not_grow() -> None:
    values = streams(8000)["rising six decades"]
    budget = BudgetController(0.1, start=0.4, window=256)
    agreement = AgreementController(0.1, (0.1, 0.4), window=256)
    # a float and a pointer for each of the 4000 would be 128 kB
    assert _memory_growth(budget.observe, values) < 4000
    assert _memory_growth(lambda value: agreement.record_audit(value, agreed=True), values) < 4000


@pytest.mark.parametrize(
    ("settings_", "field"),
    [
        ({"limit": -0.1}, "limit"),
        ({"limit": math.nan}, "limit"),
        ({"cost": 0.0}, "cost"),
        ({"burst": 1.0}, "burst"),
        ({"window": 8}, "window"),
        ({"start": math.nan}, "start"),
        ({"per": "hour"}, "per"),
    ],
)
def test_a_budget_that_cannot_work_is_refused(settings_: dict[str, float], field: str) -> None:
    arguments = {"limit": 0.1, "start": 0.4} | settings_
    with pytest.raises(ConfigurationError, match=field):
        BudgetController(**arguments)  # type: ignore[arg-type]  # one is wrong on purpose


# --- by agreement with the server


@pytest.mark.parametrize("trials", [1, 10, 300, 5000])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.995])
def test_the_bound_is_clopper_and_pearsons(trials: int, confidence: float) -> None:
    for failures in {0, trials // 50, trials // 3, trials - 1}:
        expected = scipy.stats.beta.ppf(confidence, failures + 1, trials - failures)
        # lgamma of 5000 is 4e4, and its last bit is 7e-12
        assert upper_bound(failures, trials, confidence) == pytest.approx(expected, rel=1e-10)


def test_the_bound_without_news_is_one() -> None:
    assert upper_bound(0, 0, 0.95) == 1.0
    assert upper_bound(7, 7, 0.95) == 1.0
    # no failure in n: 1 - 0.05 ** (1 / n)
    assert upper_bound(0, 10, 0.95) == pytest.approx(1 - 0.05**0.1, rel=1e-12)


GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def test_nothing_exits_until_a_threshold_holds() -> None:
    agreement = AgreementController(0.05, (0.5, 1.0))
    # ln(0.05 / 2) / ln 0.95 = 71.9 audits without a failure, and every 25th chooses: 75
    for _ in range(74):
        agreement.record_audit(0.2, agreed=True)
        assert agreement.threshold == -math.inf
        assert agreement.bound is None
    agreement.record_audit(0.2, agreed=True)
    assert agreement.threshold == 1.0
    # Bonferroni over two: 1 - 0.025 ** (1 / 75)
    assert agreement.bound == pytest.approx(1 - 0.025 ** (1 / 75), rel=1e-12)


def test_it_loosens_to_where_agreement_ends() -> None:
    agreement = AgreementController(0.1, GRID, window=1000)
    for value in np.random.default_rng(3).uniform(0, 1, 1000).tolist():
        agreement.record_audit(value, agreed=value < 0.6)
    # at 0.7 a seventh of the exits disagree, more than a tenth
    assert agreement.threshold == 0.6
    report = agreement.report()
    assert report.disagreements == 0
    assert report.bound == upper_bound(0, report.exits, 1 - 0.05 / 10)
    assert report.audits == 1000
    assert (report.delta, report.confidence) == (0.1, 0.95)


def _risks(curve: Callable[[float], float]) -> dict[float, float]:
    """Disagreement among the exits at each threshold, for uncertainties uniform on [0, 1]:
    the mean of `curve` over [0, t], by the midpoint rule.
    """
    middles = (np.arange(1000) + 0.5) / 1000
    risks = {t: float(np.mean([curve(t * middle) for middle in middles])) for t in GRID}
    return risks | {-math.inf: 0.0}


@pytest.mark.parametrize(
    "curve",
    [
        pytest.param(lambda u: 0.19 * u**2, id="rising, over the limit by a hair at 0.9"),
        pytest.param(lambda _: 0.051, id="over the limit by a hair everywhere"),
        pytest.param(lambda u: 0.2 if u < 0.2 else 0.03, id="falling"),
    ],
)
def test_the_limit_is_broken_no_more_often_than_promised(curve: Callable[[float], float]) -> None:
    delta, seeds, audits = 0.05, 200, 800
    risks = _risks(curve)
    broken = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        agreement = AgreementController(delta, GRID)
        values = rng.uniform(0, 1, audits)
        agreed = rng.uniform(0, 1, audits) >= np.array([curve(value) for value in values])
        for value, same in zip(values.tolist(), agreed.tolist(), strict=True):
            agreement.record_audit(value, agreed=same)
        broken += risks[agreement.threshold] > delta
    # at a true rate of 5 % more than this many come once in a thousand such tests
    assert broken <= scipy.stats.binom.ppf(0.999, seeds, 0.05)


def test_a_gate_under_agreement_exits_much_and_disagrees_little() -> None:
    rng = np.random.default_rng(4)
    agreement = AgreementController(0.05, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), audit_share=0.05, seed=1)
    gate = Gate(entropy, agreement.threshold)
    n = 30_000
    logits = rng.normal(0, 1, (n, 2)).astype(np.float32) * 3
    late = slice(n // 2, None)
    exits, differs, audits = (np.zeros(n, bool) for _ in range(3))
    for i, row in enumerate(logits):
        gate.threshold = agreement.threshold
        decision = gate.decide(row)
        exits[i] = decision.exit
        # the server errs where the device doubts: half of p2, a rising curve
        differs[i] = rng.random() < decision.probabilities.min() / 2
        audits[i] = agreement.wants_audit()
        if audits[i]:
            agreement.record_audit(decision.uncertainty, agreed=not differs[i])
    assert exits[late].mean() > 0.7
    assert differs[late][exits[late]].mean() <= 0.05
    # five standard deviations of a coin thrown 15,000 times: 0.9 %
    assert audits[late].mean() == pytest.approx(0.05, abs=0.009)
    # and the coin falls on exits as on offloads, or the sample would be biased
    share = audits[late][exits[late]].mean()
    assert share == pytest.approx(0.05, abs=0.011)


def test_everything_is_an_audit_while_everything_is_offloaded() -> None:
    agreement = AgreementController(0.05, (0.5,), audit_share=0.01)
    assert all(agreement.wants_audit() for _ in range(100))


def test_a_change_of_the_world_tightens_the_gate_again() -> None:
    agreement = AgreementController(0.1, (0.5, 1.0), window=200)
    for _ in range(200):
        agreement.record_audit(0.2, agreed=True)
    assert agreement.threshold == 1.0
    for i in range(200):
        agreement.record_audit(0.2, agreed=i % 2 == 0)
    assert agreement.threshold == -math.inf
    assert agreement.bound is None
    for _ in range(200):
        agreement.record_audit(0.7, agreed=True)
    # all disagreement has left the window
    assert agreement.threshold == 1.0


def test_an_uncertainty_at_a_threshold_is_no_exit_of_it() -> None:
    agreement = AgreementController(0.5, (0.5, 1.0), window=50)
    for value in (0.5, 1.0, math.nan, math.inf, 0.1) * 5:
        agreement.record_audit(value, agreed=True)
    report = agreement.report()
    assert report.threshold == 1.0
    # strictly below 1: 0.5 and 0.1, five of each
    assert report.exits == 10


def test_the_same_seed_audits_the_same_queries() -> None:
    def coins(seed: int) -> list[bool]:
        agreement = AgreementController(0.1, (0.5,), audit_share=0.3, seed=seed)
        for _ in range(50):
            agreement.record_audit(0.1, agreed=True)
        return [agreement.wants_audit() for _ in range(200)]

    assert coins(5) == coins(5)
    assert coins(5) != coins(6)


@pytest.mark.parametrize(
    ("settings_", "field"),
    [
        ({"delta": 0.0}, "delta"),
        ({"confidence": 1.0}, "confidence"),
        ({"audit_share": 0.0}, "audit_share"),
        ({"grid": ()}, "grid"),
        ({"grid": (0.5, 0.4)}, "grid"),
        ({"grid": (0.5, math.inf)}, "grid"),
        # ln 0.05 / ln 0.9 = 28.4
        ({"window": 28}, "at least 29"),
    ],
)
def test_an_agreement_that_cannot_work_is_refused(settings_: dict[str, object], field: str) -> None:
    arguments = {"delta": 0.1, "grid": (0.5,)} | settings_
    with pytest.raises(ConfigurationError, match=field):
        AgreementController(**arguments)  # type: ignore[arg-type]  # one is wrong on purpose
