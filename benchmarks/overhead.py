"""The cost of a round of each method over SplitFedV1's, and of each of its parts.

    python -m benchmarks.overhead --repeats 5
    python -m benchmarks.overhead --data DIR       Fashion-MNIST on cnn6 in place of digits on tiny

All rows have the same data, network, clients and batches, in one process. They take turns, a round
each, so that a busy machine disturbs them alike. The cost of a part is its method's time with it
less the time without it, as a share of SplitFedV1's round of the same turn. The difference of two
rounds is as rough as a round, so it is also given by place: clients, server step, weighing.
Writes overhead-DATASET.json and .md into benchmarks/results/.
"""

from __future__ import annotations

import os
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import torch
import typer
from torch import Tensor

from benchmarks.paper.tables.table import over
from benchmarks.reports import RESULTS, Results, made_by, provenance, write
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import Feedback, Reply, Request
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import Contributions, WeightRule
from server.training.methods.steps import AskClients, ClientBatches, ServerStep, needs_labels
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.report.evaluate import Evaluator
from server.training.rounds.loop import RoundLoop
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.transport import MemoryTrimmingTransport

REFERENCE: Final = "SplitFedV1"
Place = Literal["clients", "server step", "weighing"]
PLACES: Final[Sequence[Place]] = get_args(Place)
Changes = Mapping[str, Any]

_BY_SAMPLES: Final = {"parts": {"weigh": "splitfed-v1"}}


def _numbers(method: str, **numbers: Any) -> dict[str, Any]:
    return {"method": method, "method_numbers": numbers}


ROWS: Final[Mapping[str, Changes]] = {
    REFERENCE: {"method": "splitfed-v1"},
    "SplitFedV2": {"method": "splitfed-v2"},
    "BESplit": {"method": "besplit"},
    "BESplit, no EA": _numbers("besplit", ablation="no_ea"),
    "BESplit, no BCC": _numbers("besplit", ablation="no_bcc"),
    "BESplit, no DTD": _numbers("besplit", ablation="no_dtd"),
    "BESplit, no EA, no DTD": _numbers("besplit", ablation="no_dtd") | _BY_SAMPLES,
    "SCALA": {"method": "scala"},
    "SCALA, clients' adjustment": _numbers("scala", adjust="local"),
    "SCALA, no adjustment": _numbers("scala", adjust="none"),
    "HARMONY": {"method": "harmony"},
    "HARMONY, no adaptation": _numbers("harmony", adapt_steps=0),
    "HARMONY, no alignment": _numbers("harmony", align_weight=0.0),
    "HARMONY, one depth": _numbers("harmony", stochastic_depth=False),
    "SplitLPF": {"method": "splitlpf"},
    "SplitLPF, by samples": {"method": "splitlpf"} | _BY_SAMPLES,
    "SuperSFL": {"method": "supersfl"},
    "SuperSFL, equal shares": _numbers("supersfl", fusion="equal"),
    "SuperSFL, no clip": _numbers("supersfl", clip=float("inf")),
    "SuperSFL, by samples": {"method": "supersfl"} | _BY_SAMPLES,
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a method: the difference of two rows.

    Attributes:
        printed: the paper's figure in %: BESplit, Table 1, a module's share of the whole run time.
    """

    method: str
    name: str
    having: str
    lacking: str
    printed: float | None = None


PARTS: Final = (
    Part("BESplit", "EA, weights by evidence", "BESplit", "BESplit, no EA", 0.01),
    Part("BESplit", "BCC, exchange of samples", "BESplit", "BESplit, no BCC", 0.12),
    Part("BESplit", "DTD, auxiliary model", "BESplit", "BESplit, no DTD", 3.65),
    Part("BESplit", "evidential loss, records, BCC", "BESplit, no EA, no DTD", REFERENCE),
    Part("SCALA", "one step over all features", "SCALA, no adjustment", REFERENCE),
    Part("SCALA", "clients' adjustment", "SCALA, clients' adjustment", "SCALA, no adjustment"),
    Part("SCALA", "server's adjustment", "SCALA", "SCALA, clients' adjustment"),
    Part("HARMONY", "meta-adaptation, M = 3", "HARMONY", "HARMONY, no adaptation"),
    Part("HARMONY", "alignment and second view", "HARMONY", "HARMONY, no alignment"),
    Part("HARMONY", "stochastic depth", "HARMONY", "HARMONY, one depth"),
    Part("SplitLPF", "contribution weights", "SplitLPF", "SplitLPF, by samples"),
    Part("SplitLPF", "personal back, asking for its loss", "SplitLPF, by samples", REFERENCE),
    Part("SuperSFL", "fusion by depth and loss", "SuperSFL", "SuperSFL, equal shares"),
    Part("SuperSFL", "clip: each gradient's own way back", "SuperSFL", "SuperSFL, no clip"),
    Part("SuperSFL", "weights by depth and loss", "SuperSFL", "SuperSFL, by samples"),
    Part("SuperSFL", "exit head, fusion and clip", "SuperSFL, by samples", "SplitFedV2"),
)

_BASE: Final[Changes] = {
    "data": {
        "clients": 10,
        "partition": "shards",
        "numbers": {"per_client": 2},
        "held_out": 0,
        "test_max": 200,
    },
    "train": {"depth": 2, "learning_rate": 0.02, "momentum": 0.9},
}
# Every client has as many samples, so a client's share of SCALA's joint batch is the others' batch.
SCALES: Final[Mapping[str, Changes]] = {
    "digits": over(
        _BASE,
        {"data": {"name": "digits"}, "train": {"backbone": "tiny", "iterations": 15, "batch": 16}},
    ),
    "fashion-mnist": over(
        _BASE,
        {
            "data": {"name": "fashion-mnist", "train_max": 4_000},
            "train": {"backbone": "cnn6", "iterations": 5, "batch": 32},
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one row.

    Attributes:
        processor, clock: seconds. places: processor seconds by place.
        bytes: up and down.
    """

    processor: float
    clock: float
    places: Mapping[Place, float]
    bytes: int


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds of each row.")] = 5,
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST; without it, the digits.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, show_default="the data set's", help="Batches a round.")
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Compare the rounds of every method with SplitFedV1's, part by part."""
    dataset = "digits" if data is None else "fashion-mnist"
    scale = over(SCALES[dataset], {"train": {"rounds": repeats + 1}})
    words = ["--repeats", str(repeats)]
    if iterations is not None:
        scale = over(scale, {"train": {"iterations": iterations}})
        words += ["--iterations", str(iterations)]
    if data is not None:
        words += ["--data", "DIR"]
    load = os.getloadavg()[0]
    meters = {name: Meter(build_simulation(_recipe(scale, name, data))) for name in ROWS}
    rounds: dict[str, list[Round]] = {name: [] for name in ROWS}
    for number in range(1, repeats + 2):
        for name, meter in meters.items():
            rounds[name].append(meter.round(number))
        typer.echo(f"{time.strftime('%H:%M:%S')} turn {number} of {repeats + 1}")
    counted = {name: each[1:] for name, each in rounds.items()}  # the first one warms up
    personal = [meters["HARMONY"].personalising() for _ in range(repeats)]
    tables = [rounds_table(counted), parts_table(counted, personal)]
    about = {
        "title": f"The cost of a round over {REFERENCE}'s, and of each part",
        "command": f"python -m benchmarks.overhead {shlex.join(words)}",
        "dataset": dataset,
        "seed": 0,
        "load": [load, os.getloadavg()[0]],
        "recipe": scale,
    } | provenance()
    _write(results / f"overhead-{dataset}", about, counted, personal, tables)
    typer.echo("\n\n".join(tables))


class Meter:
    """A simulation with rounds that are measured place by place."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._spent: Counter[Place] = Counter()
        method = simulation.method
        assert method.server_step is not None, "every row splits the network"
        timed = replace(
            method,
            server_step=self._timed_step(method.server_step),
            weigh=self._timed_weigh(method.weigh),
        )
        transport = _TimedTransport(simulation.clients, self._at)
        self._loop = RoundLoop(
            timed, simulation.plans, simulation.state, transport, simulation.recipe.round
        )

    def round(self, number: int) -> Round:
        """Run one round and measure it."""
        self._spent.clear()
        clock, processor = time.perf_counter(), time.process_time()
        result = self._loop.run_round(number, self._simulation.recipe.seed)
        processor, clock = time.process_time() - processor, time.perf_counter() - clock
        assert set(result.participants) == set(self._simulation.clients), (
            "expected every client to take part"
        )
        places = {place: self._spent[place] for place in PLACES}
        return Round(processor, clock, places, result.bytes_up + result.bytes_down)

    def personalising(self) -> float:
        """Processor seconds to fine-tune all clients once.    HARMONY, Eq. 5"""
        plain = replace(self._simulation, method=replace(self._simulation.method, finetune_steps=0))
        seconds = []
        for simulation in (self._simulation, plain):
            evaluator, start = Evaluator(simulation), time.process_time()
            evaluator.clients(supervised=True)
            seconds.append(time.process_time() - start)
        return seconds[0] - seconds[1]

    @contextmanager
    def _at(self, place: Place) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self._spent[place] += time.process_time() - start  # type: ignore[assignment]  # seconds

    def _timed_step(self, step: ServerStep) -> ServerStep:
        def answering(state: ServerState, batches: ClientBatches, now: RoundView) -> Any:
            with self._at("server step"):
                return step(state, batches, now)

        def asking(state: ServerState, batches: ClientBatches, now: RoundView) -> AskClients:
            under_way: Any = step(state, batches, now)
            replies = None
            while True:
                try:
                    with self._at("server step"):
                        outputs: dict[str, Tensor] = under_way.send(replies)
                except StopIteration as done:
                    feedback: dict[str, Feedback] = done.value
                    return feedback
                replies = yield outputs

        return answering if needs_labels(step) else asking

    def _timed_weigh(self, weigh: WeightRule) -> WeightRule:
        def timed(contributions: Contributions, now: RoundView) -> dict[str, float]:
            with self._at("weighing"):
                return dict(weigh(contributions, now))

        return timed


class _TimedTransport(MemoryTrimmingTransport):
    """The transport of simulations; time inside it is the clients'."""

    def __init__(self, clients: Mapping[str, TrainingClient], at: Callable[[Place], Any]) -> None:
        super().__init__(clients)
        self._at = at

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        with self._at("clients"):
            return super().exchange(requests, deadline_s)


def rounds_table(rounds: Mapping[str, Sequence[Round]]) -> str:
    """Round of every row, over SplitFedV1's of the same turn."""
    heads = ["", "by processor time", "by the clock", *PLACES, "processor, s", "MB", "bytes"]
    lines = [f"| {' | '.join(heads)} |", f"| ---{' | ---' * (len(heads) - 1)} |"]
    reference = rounds[REFERENCE]
    for name, each in rounds.items():
        pairs = list(zip(each, reference, strict=True))
        size = each[-1].bytes
        cells = [
            name,
            _ranged([own.processor / base.processor for own, base in pairs]),
            _ranged([own.clock / base.clock for own, base in pairs]),
            *(
                f"{statistics.median(o.places[place] / b.processor for o, b in pairs):.3f}"
                for place in PLACES
            ),
            f"{statistics.median(own.processor for own in each):.3f}",
            f"{size / 1e6:.2f}",
            f"{size / reference[-1].bytes:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parts_table(rounds: Mapping[str, Sequence[Round]], personal: Sequence[float]) -> str:
    """Cost of every part in % of SplitFedV1's round, in all and by place; the papers' figures."""
    heads = ["method", "part", "whole round", *PLACES, "bytes", "paper"]
    lines = [f"| {' | '.join(heads)} |", f"| ---{' | ---' * (len(heads) - 1)} |"]
    reference = rounds[REFERENCE]
    for part in PARTS:
        turns = list(zip(rounds[part.having], rounds[part.lacking], reference, strict=True))
        more = turns[-1][0].bytes - turns[-1][1].bytes
        cells = [
            part.method,
            part.name,
            _percent([(w.processor - o.processor) / base.processor for w, o, base in turns]),
            *(
                _percent([(w.places[at] - o.places[at]) / base.processor for w, o, base in turns])
                for at in PLACES
            ),
            f"{100 * more / reference[-1].bytes:.2f}",
            "-" if part.printed is None else f"{part.printed:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    base_s = statistics.median(each.processor for each in reference)
    once = _percent([seconds / base_s for seconds in personal])
    lines.append(f"| HARMONY | personalisation, once after training | {once} | | | | 0.00 | - |")
    return "\n".join(lines)


def _recipe(scale: Changes, row: str, data: Path | None) -> Recipe:
    recipe = over(scale, ROWS[row])
    if recipe["method"] == "scala":  # its batch is of all participants together
        joint = recipe["train"]["batch"] * recipe["data"]["clients"]
        recipe = over(recipe, {"train": {"batch": joint}})
    if data is not None:
        recipe = over(recipe, {"data": {"folder": str(data)}})
    return read_recipe(recipe)


def _write(
    path: Path,
    about: Mapping[str, Any],
    rounds: Mapping[str, Sequence[Round]],
    personal: Sequence[float],
    tables: Sequence[str],
) -> None:
    report = dict(about) | {
        "rows": {name: ROWS[name] for name in rounds},
        "parts": [asdict(part) for part in PARTS],
        "rounds": {name: [asdict(each) for each in some] for name, some in rounds.items()},
        "personalising_s": list(personal),
    }
    train, data = about["recipe"]["train"], about["recipe"]["data"]
    before, after = about["load"]
    ran = f"{made_by(about)} Load {before:.1f} to {after:.1f}."
    values = (
        f"`{train['backbone']}` cut at {train['depth']}, {data['clients']} clients of two shards,"
        f" {train['iterations']} batches of {train['batch']} a round and client, seed"
        f" {about['seed']}. Median (least to most) of {len(personal)} turns after one to warm up."
    )
    of_rounds = (
        f"Multiples of {REFERENCE}'s round of the same turn. Clients, server step and weighing are"
        f" processor time at that place, over {REFERENCE}'s whole round."
    )
    of_parts = (
        f"A method's round with the part less its round without, in % of {REFERENCE}'s round of"
        " the same turn, by processor time: in all, and at each place alone. Bytes in % of"
        f" {REFERENCE}'s. The paper's figures are BESplit's, Table 1: a module's mean share of the"
        " whole run time over its data sets."
    )
    blocks = [f"# {about['title']}: {about['dataset']}", ran, values]
    blocks += ["## Rounds", of_rounds, tables[0], "## Parts", of_parts, tables[1]]
    write(path, report, blocks)


def _ranged(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _percent(shares: Sequence[float]) -> str:
    low, middle, high = (100 * f(shares) for f in (min, statistics.median, max))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
