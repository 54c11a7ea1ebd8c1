"""Figures of a comparison: means over the seeds, their intervals, and differences seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.training.comparison.comparison import Training
from server.training.comparison.intervals import Interval, mean_interval


@dataclass(frozen=True, slots=True)
class Reaching:
    """The cost up to the target, over the seeds that reached it.

    Attributes:
        seeds: number of seeds that reached it.
        rounds, megabytes, seconds: None where none did.
    """

    seeds: int
    rounds: Interval | None
    megabytes: Interval | None
    seconds: Interval | None


@dataclass(frozen=True, slots=True)
class Power:
    """Energy of one recipe's trainings over the seeds.

    Attributes:
        kilojoules: of a training. watts_per_point: mean watts over the accuracy in percent.
        co2_g: None for a recipe that does not say what its kilowatt hours emit.
    """

    kilojoules: Interval
    watts_per_point: Interval
    co2_g: Interval | None


@dataclass(frozen=True, slots=True)
class Line:
    """Figures of one recipe over the seeds, with 95 % intervals.

    Attributes:
        accuracy: on the test part, 0 to 1.
        difference: accuracy less that of the first recipe with the same seed; None for the first
            recipe itself. Seeds share what makes a data set and its clients easy or hard, so that
            the interval of the differences is narrower than those of the accuracies.
        accuracy_clients: mean over the clients, each on its own test samples.
        megabytes: payload of all clients in both directions. seconds: of training.
        reaching: None without a target.
        power: None where the energy of a seed is not known.
    """

    name: str
    accuracy: Interval
    difference: Interval | None
    accuracy_clients: Interval
    megabytes: Interval
    seconds: Interval
    reaching: Reaching | None
    power: Power | None = None

    def to_dict(self) -> dict[str, Any]:
        """The line as a report has it."""
        reaching, power = self.reaching, self.power
        return {
            "accuracy": _table(self.accuracy),
            "difference": _table(self.difference),
            "accuracy_clients": _table(self.accuracy_clients),
            "megabytes": _table(self.megabytes),
            "seconds": _table(self.seconds),
            "reaching": None
            if reaching is None
            else {
                "seeds": reaching.seeds,
                "rounds": _table(reaching.rounds),
                "megabytes": _table(reaching.megabytes),
                "seconds": _table(reaching.seconds),
            },
            "power": None
            if power is None
            else {
                "kilojoules": _table(power.kilojoules),
                "watts_per_point": _table(power.watts_per_point),
                "co2_g": _table(power.co2_g),
            },
        }


def lines_of(trainings: Sequence[Training], target: float | None = None) -> list[Line]:
    """A line for each recipe, in the order of the trainings.

    Args:
        trainings: every recipe with every seed, at least one; the first is the reference's.
        target: accuracy on the test part, 0 to 1.
    """
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        groups.setdefault(training.name, []).append(training)
    first = trainings[0].name
    reference = {training.seed: training.accuracy for training in groups[first]}
    return [_line(name, group, reference, first, target) for name, group in groups.items()]


def _line(
    name: str,
    group: Sequence[Training],
    reference: Mapping[int, float],
    first: str,
    target: float | None,
) -> Line:
    differences = [each.accuracy - reference[each.seed] for each in group]
    return Line(
        name,
        mean_interval([each.accuracy for each in group]),
        None if name == first else mean_interval(differences),
        mean_interval([each.accuracy_clients for each in group]),
        mean_interval([each.megabytes for each in group]),
        mean_interval([each.seconds for each in group]),
        None if target is None else _reaching(group, target),
        _power(group),
    )


def _power(group: Sequence[Training]) -> Power | None:
    known = [each.energy for each in group if each.energy is not None]
    if len(known) < len(group):
        return None
    co2 = [one["co2_g"] for one in known]
    return Power(
        mean_interval([one["joules"] / 1e3 for one in known]),
        mean_interval([one["watts_per_point"] for one in known]),
        None if None in co2 else mean_interval(co2),
    )


def _reaching(group: Sequence[Training], target: float) -> Reaching:
    costs = [cost for each in group if (cost := each.reached(target)) is not None]
    if not costs:
        return Reaching(0, None, None, None)
    return Reaching(
        len(costs),
        mean_interval([float(cost.rounds) for cost in costs]),
        mean_interval([cost.bytes_total / 1e6 for cost in costs]),
        mean_interval([cost.seconds for cost in costs]),
    )


def headings(first: str, target: float | None, *, power: bool = False) -> list[str]:
    """Headings of the table, those of `cells`."""
    left = ["recipe", "accuracy, %", f"against {first}, points", "clients, %", "MB", "seconds"]
    if power:
        left += ["kJ", "W a point", "CO2, g"]
    if target is None:
        return left
    return [*left, f"reached {100 * target:g} %", "rounds to it", "MB to it", "seconds to it"]


def cells(line: Line, seeds: int, *, power: bool = False) -> list[str]:
    """A line of the table: mean ± half width of the interval.

    Args:
        power: with the cells of the energy, which some line has.
    """
    texts = [
        line.name,
        shown(line.accuracy, 100),
        "-" if line.difference is None else shown(line.difference, 100, sign=True),
        shown(line.accuracy_clients, 100),
        shown(line.megabytes),
        shown(line.seconds),
    ]
    if power:
        own = line.power
        figures = (None,) * 3 if own is None else (own.kilojoules, own.watts_per_point, own.co2_g)
        texts += ["-" if figure is None else shown(figure) for figure in figures]
    found = line.reaching
    if found is not None:
        costs = (found.rounds, found.megabytes, found.seconds)
        texts += [f"{found.seeds} of {seeds}", *("-" if c is None else shown(c) for c in costs)]
    return texts


def shown(interval: Interval, factor: float = 1.0, *, sign: bool = False) -> str:
    """The interval with a hundredth's or, from 100 on, no decimals; the mean alone of one seed."""
    mean, half = factor * interval.mean, factor * interval.half_width
    if math.isnan(mean):
        return "-"
    digits = 0 if max(abs(mean), 0.0 if math.isnan(half) else half) >= 1000 else 2
    text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"


def _table(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {"mean": interval.mean, "half_width": interval.half_width, "seeds": interval.seeds}
