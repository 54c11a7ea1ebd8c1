"""Figures over the seeds: by scipy's tests, and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from scipy import stats

from server.training.comparison.comparison import Training
from server.training.comparison.figures import cells, headings, lines_of


def training(
    name: str, seed: int, curve: Sequence[float | None], energy: dict[str, float] | None = None
) -> Training:
    rounds: list[dict[str, Any]] = [
        {"round": at, "accuracy": value, "seconds": 2.0, "bytes_up": 600_000, "bytes_down": 400_000}
        for at, value in enumerate(curve, start=1)
    ]
    final = {"accuracy": curve[-1], "accuracy_clients": None}
    known = dict.fromkeys(("joules", "watts_per_point", "co2_g"))
    return Training(
        name,
        seed,
        {
            "rounds": rounds,
            "final": final,
            "energy": known | {"rounds": len(curve)} | (energy or {}),
        },
    )


ONES = (0.61, 0.74, 0.70, 0.66)
OTHERS = (0.65, 0.79, 0.71, 0.72)


def test_intervals_are_scipys() -> None:
    trainings = [
        each
        for seed, (one, other) in enumerate(zip(ONES, OTHERS, strict=True))
        for each in (training("one", seed, [one]), training("other", seed, [other]))
    ]
    first, second = lines_of(trainings)
    assert first.difference is None
    assert second.difference is not None
    alone = stats.ttest_1samp(OTHERS, 0).confidence_interval(0.95)
    assert second.accuracy.mean - second.accuracy.half_width == pytest.approx(alone.low)
    assert second.accuracy.mean + second.accuracy.half_width == pytest.approx(alone.high)
    # of the differences seed by seed
    paired = stats.ttest_rel(OTHERS, ONES).confidence_interval(0.95)
    assert second.difference.mean - second.difference.half_width == pytest.approx(paired.low)
    assert second.difference.mean + second.difference.half_width == pytest.approx(paired.high)


def test_power_is_shown_where_every_seed_of_a_recipe_knows_it() -> None:
    known = [{"joules": joules, "watts_per_point": 0.5, "co2_g": 2.0} for joules in (1e3, 3e3)]
    trainings = [
        *(training("one", seed, [0.5], known[seed]) for seed in range(2)),
        training("other", 0, [0.5], known[0]),
        training("other", 1, [0.5]),
    ]
    one, other = lines_of(trainings)
    assert other.power is None
    # of a training that went on after a stop, the energy of the first rounds is lost
    (stopped,) = lines_of([training("one", 0, [0.5, 0.6], known[0] | {"rounds": 1})])
    assert stopped.power is None
    assert one.power is not None
    assert one.power.kilojoules.mean == 2.0
    assert headings("one", None, power=True)[-3:] == ["kJ", "W a point", "CO2, g"]
    # of 1 and 3 the deviation is 1.41, t for two values 12.71: 12.71 * 1.41 / 1.41
    assert cells(one, 2, power=True)[-3:] == ["2.00 ± 12.71", "0.50 ± 0.00", "2.00 ± 0.00"]
    assert cells(other, 2, power=True)[-3:] == ["-"] * 3
    assert len(cells(one, 2)) == len(headings("one", None))


def test_cost_to_the_target_is_of_the_seeds_that_reached_it() -> None:
    trainings = [
        training("one", 0, [0.2, None, 0.9]),
        training("one", 1, [0.9, 0.9, 0.9]),
        training("one", 2, [0.2, 0.2, 0.2]),
    ]
    (line,) = lines_of(trainings, 0.8)
    assert line.reaching is not None
    assert line.reaching.seeds == 2
    assert line.reaching.rounds is not None
    assert line.reaching.megabytes is not None
    assert (line.reaching.rounds.mean, line.reaching.megabytes.mean) == (2.0, 2.0)
    (never,) = lines_of(trainings, 0.95)
    assert cells(never, 3)[-4:] == ["0 of 3", "-", "-", "-"]
    assert len(cells(never, 3)) == len(headings("one", 0.95)) == 10


def test_a_line_reads_as_a_table_has_it() -> None:
    trainings = [
        training("one", 0, [0.5]),
        training("other", 0, [0.4]),
        training("one", 1, [0.7]),
        training("other", 1, [0.5]),
    ]
    first, second = lines_of(trainings)
    # t(0.975, 1) = 12.706; sd of 50 and 70 is 14.142: 12.706 * 14.142 / sqrt 2
    assert cells(first, 2) == ["one", "60.00 ± 127.06", "-", "-", "1.00 ± 0.00", "2.00 ± 0.00"]
    # -10 and -20 points
    assert cells(second, 2)[:3] == ["other", "45.00 ± 63.53", "-15.00 ± 63.53"]
    assert math.isnan(second.accuracy_clients.mean)
    (alone,) = lines_of(trainings[:1])
    assert cells(alone, 1)[1] == "50.00"
