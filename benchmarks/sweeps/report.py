"""Tables of a sweep: means over the seeds with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.reports import made_by, provenance, write
from benchmarks.sweeps.catalog import Kind, Line, Sweep
from server.training.comparison.comparison import Training
from server.training.comparison.intervals import mean_interval

Column = Callable[[Training], float | None]


def _accuracy(training: Training) -> float:
    return 100 * training.accuracy


def _clients(training: Training) -> float:
    return 100 * training.accuracy_clients


def _epsilon(training: Training) -> float | None:
    found = training.report["privacy"]
    epsilon: float | None = None if found is None else found["epsilon"]
    return epsilon


def _lost(training: Training) -> float:
    """Rounds whose result could not be merged."""
    return sum(not row["merged"] for row in training.rows)


def _by_class(training: Training) -> Mapping[str, float]:
    found: Mapping[str, float] = training.report["final"]["accuracy_by_class"]
    return found


def _class(pick: Callable[[Sequence[float]], float]) -> Column:
    def column(training: Training) -> float:
        return 100 * pick(list(_by_class(training).values()))

    return column


def _energy(key: str, factor: float = 1.0) -> Column:
    def column(training: Training) -> float | None:
        found: float | None = None if training.energy is None else training.energy[key]
        return None if found is None else factor * found

    return column


def _auxiliary(training: Training) -> float:
    return 100 * float(training.report["final"]["auxiliary"]["accuracy"])


def _after(rounds: int) -> Column:
    """Accuracy after that round; None for a training that has fewer."""

    def column(training: Training) -> float | None:
        if len(training.rows) < rounds:
            return None
        found: float | None = training.rows[rounds - 1]["accuracy"]
        return None if found is None else 100 * found

    return column


def _rounds_to(target: float) -> Column:
    def column(training: Training) -> float | None:
        found = training.reached(target)
        return None if found is None else float(found.rounds)

    return column


_PLAIN: Final[Mapping[str, Column]] = {"accuracy, %": _accuracy, "clients, %": _clients}
_COLUMNS: Final[Mapping[Kind, Mapping[str, Column]]] = {
    "plain": _PLAIN,
    "auxiliary": {"BESplit-G, %": _accuracy, "BESplit-A, %": _auxiliary},
    "privacy": {"accuracy, %": _accuracy, "epsilon": _epsilon, "rounds without a merge": _lost},
    "cost": {
        **_PLAIN,
        "worst class, %": _class(min),
        "best class, %": _class(max),
        "W": _energy("watts"),
        "W a point": _energy("watts_per_point"),
        "kJ": _energy("joules", 1e-3),
        "CO2, g": _energy("co2_g"),
    },
    "start": {
        "after 1 round, %": _after(1),
        "after 5 rounds, %": _after(5),
        "at the end, %": _accuracy,
        "rounds to 70 %": _rounds_to(0.7),
        "rounds to 90 %": _rounds_to(0.9),
    },
}


def tables_of(sweep: Sweep, trainings: Sequence[Training]) -> list[str]:
    """A table for each group, and for the sweep of methods one of their classes."""
    found = []
    columns = _COLUMNS[sweep.kind]
    for group in sweep.groups:
        rows = [["setting", *columns]]
        for line in group.lines:
            own = _of(line, trainings)
            cell = _counted if sweep.kind == "start" else _cell
            rows.append(
                [_setting(line, sweep), *(cell(column, own) for column in columns.values())]
            )
        found.append(f"## {group.title}\n\n{_table(rows)}")
    if sweep.kind == "cost":
        found += [f"## Accuracy by class, %\n\n{_table(list(_classes(sweep, trainings)))}"]
    return found


def write_sweep(
    path: Path, command: str, sweep: Sweep, rounds: int, trainings: Sequence[Training]
) -> None:
    """Write PATH.json and PATH.md."""
    about = {"command": command} | provenance()
    seeds = sorted({training.seed for training in trainings})
    report = about | {
        "rounds": rounds,
        "seeds": seeds,
        "trials": [
            training.figures()
            | {
                "name": training.name,
                "privacy": training.report["privacy"],
                "energy": training.report.get("energy"),
                "by_class": training.report["final"].get("accuracy_by_class"),
                "auxiliary": (training.report["final"].get("auxiliary") or {}).get("accuracy"),
            }
            for training in trainings
        ],
    }
    part = "held-out samples" if sweep.held_out else "the test part"
    means = (
        f"{rounds} rounds, seeds {', '.join(map(str, seeds))}; accuracies are of {part}; means with"
        " 95 % intervals of Student's t."
    )
    if sweep.kind == "start":
        means += " Rounds are counted over the seeds that got there; `2 of 3` did."
    if "clients, %" in _COLUMNS[sweep.kind]:
        means += " `clients`: mean over the clients, each on its own classes."
    tables = tables_of(sweep, trainings)
    write(path, report, [f"# {sweep.title}", made_by(about), sweep.about, means, *tables])


def _classes(sweep: Sweep, trainings: Sequence[Training]) -> Iterator[list[str]]:
    """Rows of the table of classes: means over the seeds."""
    lines = [line for group in sweep.groups for line in group.lines]
    names = list(_by_class(trainings[0]))
    yield ["method", *names]
    for line in lines:
        own = [_by_class(one) for one in _of(line, trainings)]
        means = [100 * math.fsum(each[name] for each in own) / len(own) for name in names]
        yield [line.recipe, *(f"{mean:.1f}" for mean in means)]


def _of(line: Line, trainings: Sequence[Training]) -> list[Training]:
    return [training for training in trainings if training.name == line.name]


def _setting(line: Line, sweep: Sweep) -> str:
    """The last value that is changed, which differs from line to line; else the recipe's name."""
    if sweep.kind == "start":
        return "pre-trained" if line.pretrained else "random"
    return line.recipe if sweep.kind == "cost" else str(list(line.values.values())[-1])


def _cell(column: Column, own: Sequence[Training]) -> str:
    values = [column(training) for training in own]
    if any(value is None for value in values):
        return "none"
    found = mean_interval([value for value in values if value is not None])
    if math.isnan(found.mean):
        return "none"
    if found.seeds == 1 or found.half_width == 0:
        return f"{found.mean:.4g}"
    return str(found)


def _counted(column: Column, own: Sequence[Training]) -> str:
    """The mean of the seeds that have the figure, and how many have it where some do not."""
    known = [training for training in own if column(training) is not None]
    text = _cell(column, known) if known else "never"
    return text if len(known) in {0, len(own)} else f"{text} ({len(known)} of {len(own)})"


def _table(rows: Sequence[Sequence[Any]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest))
