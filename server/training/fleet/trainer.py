"""Rounds with real devices: from a recipe and those who are there to weights, a log and a report.

    STATE/training/NAME/log.jsonl             one line a round
    STATE/training/NAME/checkpoints/          the last two rounds; --resume goes on from there
    STATE/training/NAME/begun.jsonl           under noise: rounds that devices were asked in
    STATE/training/NAME/late/                 updates of past rounds that no round has merged yet
    STATE/training/NAME/run.id                tells this run from another one of that name
    STATE/training/NAME/weights.safetensors   what was learnt, for `splitedge export`
    STATE/training/NAME/report.json

Devices may come and go: who says hello is asked from the next round on, who is away is named.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.nets.copying import copied
from edge_sdk.nets.supernet import Supernet
from edge_sdk.state import StateLock
from edge_sdk.training.data.load import Array, Dataset
from edge_sdk.training.device.warmup import warm_up
from edge_sdk.training.protocol.noise import NO_SCORES
from profiles import DeviceProfile, InvalidProfileError
from profiles.allocation import fit_to_cut, supersfl_depth, supersfl_latency_ms
from server.http_server import HttpServer, listen
from server.registry.credentials import secret_sha256
from server.registry.database import Registry, open_registry, registry_file
from server.registry.operator import load_operator_secret
from server.settings import Address, refuse_clear_text
from server.training.fleet.api import Welcome, create_app
from server.training.fleet.invite import Inviter
from server.training.fleet.late_updates import LateUpdates
from server.training.fleet.mailbox import SILENCE_S, Hello, HttpTransport, Mailbox, Missed
from server.training.fleet.started_rounds import BegunRounds, Samples
from server.training.recipe.privacy import privacy_of
from server.training.recipe.recipe import Recipe
from server.training.report.cost import answer_latency, training_cost
from server.training.report.device_scores import (
    NO_OOD,
    DeviceScore,
    ask_scores,
    fleet_energy,
    summarise,
)
from server.training.rounds.loop import RoundLoop
from server.training.rounds.own_pace import OwnPaceEngine
from server.training.rounds.traffic import TrafficCounter
from server.training.rounds.transport import LocalTransport
from server.training.run.checkpoint import (
    Row,
    check_same_recipe,
    discard,
    latest_checkpoint,
    save_checkpoint,
)
from server.training.simulation.build import (
    World,
    build_network,
    load_data,
    plan_of,
    server_state,
)
from server.training.simulation.run import LOG, REPORT, line_of, row_of, write_report

logger = logging.getLogger(__name__)

Report = dict[str, Any]

WEIGHTS: Final = "weights.safetensors"
RUN: Final = "run.id"
# SuperSFL's 5 s, counted from the latest moment at which the server closes a step.
NO_REPLY_S: Final = 5.0
END_S: Final = 10.0
# Signs of life in the silence after which a device is away: some get lost.
BEATS: Final = 4
# Beside the weights of the whole network, which no update exceeds: features of one batch, headers.
REPLY_SLACK_BYTES: Final = 64_000_000
TEST_BATCH: Final = 512


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How a training with real devices is run.

    Attributes:
        state: the server's state folder; its registry says who may take part.
        name: of the training: its folder, and what devices call their personal weights.
        http: where devices reach the trainer.
        min_devices: how many have to be there for the first round; the recipe's `data.clients`
            where None.
        join_s: how long to wait for them, and later for those that a quorum lacks.
        silence_s: a device not heard of for so long is away, whatever it holds.
        server: URL of the running server, which invites the devices; None invites nobody.
        tls_cert, tls_key: PEM files, the server's own.
        insecure: listen in the clear off loopback all the same.
    """

    state: Path
    name: str
    http: Address
    min_devices: int | None = None
    join_s: float = 600.0
    silence_s: float = SILENCE_S
    resume: bool = False
    server: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigurationError("TLS needs both a certificate and its key")
        if self.tls_cert is None and not self.insecure:
            refuse_clear_text("--http", self.http)
        if self.min_devices is not None and self.min_devices < 1:
            raise ConfigurationError(f"--min-devices: expected 1 or more, got {self.min_devices}")
        if not 1 <= self.silence_s < math.inf:
            raise ConfigurationError(f"--silence: expected 1 s or more, got {self.silence_s}")

    @property
    def folder(self) -> Path:
        """Of everything that the training leaves."""
        return self.state / "training" / self.name


@dataclass(frozen=True, slots=True)
class _Keys:
    registry: Registry
    operator_sha256: str


def train(
    recipe: Recipe,
    settings: TrainerSettings,
    *,
    say: Callable[[str], None],
    on_round: Callable[[Row], None],
) -> Report:
    """Train to the recipe's last round.

    Args:
        say: told where the trainer listens, whom it waits for and whom it refused; the last by
            threads of the listener's.
        on_round: called with each row of the report as it comes.
    Returns: what `report.json` holds.
    Raises: ConfigurationError where recipe, state and settings do not go together; LinkError if
        too few devices are there; StateInUseError if this training runs already.
    """
    recipe = replace(recipe, round=recipe.round.with_devices())
    if not registry_file(settings.state).is_file():
        raise ConfigurationError(f"{settings.state}: no server has kept its state there")
    with ExitStack() as stack:
        stack.enter_context(StateLock(settings.folder, "training"))
        registry = open_registry(settings.state)
        stack.callback(registry.close)
        secret = load_operator_secret(settings.state)
        dataset = load_data(recipe)
        first = settings.min_devices or recipe.data.clients
        world = _world(recipe, dataset, first)
        warm_up()
        late = LateUpdates(settings.folder)
        rows = _rows_so_far(world, dataset, settings)
        begun = None
        if world.method.client.noise is not None:
            begun = BegunRounds(settings.folder, resume=settings.resume)
        run = _run_id(settings, late)
        mailbox = Mailbox(
            _delivered(rows),
            late=late.load(),
            keep=late.keep,
            together=recipe.round.buffer is None,
            silence_s=settings.silence_s,
        )
        refused: dict[str, str] = {}

        def tell_refused(device: str, why: str) -> None:
            if refused.get(device) != why:  # it may try again and again
                refused[device] = why
                say(f"splitedge train: {device} refused: {why}")

        app = create_app(
            mailbox,
            _Keys(registry, secret_sha256(secret)),
            Welcome(
                training=settings.name,
                run=run,
                no_reply_s=recipe.round.step_deadline_s + NO_REPLY_S,
                alive_s=settings.silence_s / BEATS,
            ),
            Hello(1, tuple(dataset.x_train.shape[1:]), dataset.classes),
            reply_bytes_max=_bytes(world.state.net) + REPLY_SLACK_BYTES,
            samples_max=recipe.round.samples_max,
            refused=tell_refused,
        )
        http = stack.enter_context(
            HttpServer(app, listen(settings.http), settings.tls_cert, settings.tls_key)
        )
        if settings.server is not None:
            ask = Inviter(settings.server, secret, http.url, settings.tls_cert)
            stack.enter_context(ask.inviting(registry, mailbox))
        trainer = _Trainer(
            world, dataset, mailbox, registry, settings, begun=begun, refused=refused
        )
        stack.callback(trainer.end_rounds)
        say(f"splitedge train: {http.url}, waiting for {first} devices")
        trainer.gather(first)
        # the checkpoint is what counts: a line that was logged and not saved is logged again
        write_atomic(settings.folder / LOG, b"".join(map(line_of, rows)))
        for row in rows:
            on_round(row)
        while len(rows) < recipe.train.rounds:
            rows.append(trainer.round(len(rows) + 1))
            with world.loop.paused():
                save_checkpoint(settings.folder, world, rows)
            late.prune(mailbox.kept)
            with (settings.folder / LOG).open("ab") as log:
                log.write(line_of(rows[-1]))
            on_round(rows[-1])
        trainer.end_rounds()
        scored = trainer.score(len(rows))
        mailbox.end(END_S)
        late.prune()  # no round is left to merge them
        interrupted = [] if begun is None else begun.interrupted(rows)
        return _finish(world, rows, settings, scored, interrupted)


@dataclass(frozen=True, slots=True)
class Scored:
    """What devices said after the last round.

    Attributes:
        missed: those that did not, and why. bytes_down: the weights that it took.
    """

    devices: list[DeviceScore]
    missed: dict[str, list[dict[str, str]]]
    bytes_down: int
    seconds: float


class _Trainer:
    """Rounds with whoever is there."""

    def __init__(
        self,
        world: World,
        dataset: Dataset,
        mailbox: Mailbox,
        registry: Registry,
        settings: TrainerSettings,
        *,
        begun: BegunRounds | None,
        refused: dict[str, str],
    ) -> None:
        self._world = world
        self._dataset = dataset
        self._mailbox = mailbox
        self._registry = registry
        self._settings = settings
        self._begun = begun
        self._refused = refused  # devices whose data do not fit, and why; grows meanwhile

    def gather(self, count: int) -> None:
        """Wait for devices, and give a plan to those that have none yet.

        Raises: LinkError if fewer than `count` are there in time.
        """
        there = self._mailbox.wait_there(count, self._settings.join_s)
        if len(there) < count:
            refused = "".join(
                f"; {name} was refused: {why}"
                for name, why in sorted(self._refused.copy().items())
                if name not in there
            )
            raise LinkError(
                f"expected {count} devices within {self._settings.join_s:g} s, got {len(there)}"
                f" ({', '.join(there) or 'none'}){refused}; start"
                " `splitedge agent train` on them, and this again with --resume"
            )
        plans, recipe = self._world.plans, self._world.recipe
        new = [name for name in there if name not in plans]
        profiles = {name: self._profile(name) for name in {*new, *plans}}
        net, method = self._world.state.net, self._world.method
        depths = choose_depths(recipe.train.depth, net, profiles)
        for name in new:
            depth = net.L if method.client.whole else depths[name]
            plans[name] = plan_of(recipe, method, self._dataset, depth)
            logger.info("device=%s depth=%d takes part", name, depth)
        ordered = sorted(plans.items())  # floats are added in this order
        plans.clear()
        plans.update(ordered)

    def end_rounds(self) -> None:
        """Leave those who are still at work; nobody has missed what is not asked any more."""
        self._mailbox.end_rounds()
        self._world.loop.close()
        self._mailbox.take_missed()

    def score(self, number: int) -> Scored:
        """What the devices make of the weights after the last round, those that are there."""
        if self._world.method.client.noise is not None:  # they would refuse, and rightly
            why = [{"what": "evaluate", "why": NO_SCORES}]
            return Scored([], dict.fromkeys(self._world.plans, why), 0, 0.0)
        profiles = {name: self._profile(name) for name in self._world.plans}
        ledger, start = TrafficCounter(), time.perf_counter()
        transport = HttpTransport(self._mailbox)
        scores = ask_scores(self._world, transport, profiles, number, ledger)
        missed = _missed(self._mailbox.take_missed())
        return Scored(scores, missed, ledger.down, time.perf_counter() - start)

    def _profile(self, name: str) -> DeviceProfile:
        return DeviceProfile.from_dict(self._registry.device(name).profile)

    def round(self, number: int) -> Row:
        """One round, and its row of the report."""
        world, recipe = self._world, self._world.recipe
        wanted = recipe.round.buffer or len(world.plans)
        self.gather(max(1, math.ceil(recipe.round.quorum * wanted - 1e-9)))
        if self._begun is not None:
            self._begun.begin(number, world.plans, self._mailbox.samples())
        world.loop.set_clients(world.plans, HttpTransport(self._mailbox))
        result = world.loop.run_round(number, recipe.seed, self._mailbox.take_late())
        measured = number % recipe.evaluate.every == 0 or number == recipe.train.rounds
        right = self._accuracy() if measured else None
        missed = _missed(self._mailbox.take_missed())
        return row_of(result, right, "full") | {
            "missed": missed,
            "stale": dict(result.stale),
            "dropped": self._mailbox.take_counts(),
        }

    def _accuracy(self) -> float:
        """Of a copy: those at work go on with the network itself meanwhile."""
        world = self._world
        with world.loop.paused():
            net = copied(_served(world))
        return accuracy(net, world.x_test, world.y_test)


def choose_depths(
    fixed: int | None, net: Supernet, profiles: Mapping[str, DeviceProfile]
) -> dict[str, int]:
    """A depth for each device: the recipe's own, or SuperSFL's Eq. 1 with the devices' profiles.

    A device whose link was never measured counts as the slowest.

    Raises: ConfigurationError if the recipe's depth is no cut.
    """
    if fixed is not None:
        if fixed not in net.cuts:
            cuts = ", ".join(map(str, net.cuts))
            raise ConfigurationError(f"train: depth: expected one of {cuts}; got {fixed}")
        return dict.fromkeys(profiles, fixed)
    latencies: dict[str, float] = {}
    for name, profile in profiles.items():
        try:
            latencies[name] = supersfl_latency_ms(profile)
        except InvalidProfileError as err:
            logger.warning("device=%s counts as the slowest: %s", name, err)
    low, high = min(latencies.values(), default=0.0), max(latencies.values(), default=0.0)
    return {
        name: fit_to_cut(
            supersfl_depth(profile.memory_total_gb, latencies.get(name, high), low, high, net.L),
            net.cuts,
        )
        for name, profile in profiles.items()
    }


def accuracy(net: Supernet, x: Array, y: NDArray[np.int64]) -> float:
    """Share of the test samples that the whole network labels right."""
    net.eval()
    right = 0
    with torch.inference_mode():
        for at in range(0, len(y), TEST_BATCH):
            logits = net(torch.from_numpy(np.ascontiguousarray(x[at : at + TEST_BATCH])))
            right += int((logits.argmax(1).numpy() == y[at : at + TEST_BATCH]).sum())
    return right / len(y)


def trained_exits(world: World, rows: list[Row]) -> list[int]:
    """Depths whose exit heads the server holds trained: shared, and of a device that took part."""
    if not world.method.share_exits:
        return []
    took_part = {name for row in rows for name in row["participants"]}
    plans = [plan for name, plan in world.plans.items() if name in took_part]
    return sorted({plan.depth for plan in plans if plan.part.exit_head})


def _world(recipe: Recipe, dataset: Dataset, devices: int) -> World:
    """The recipe without clients of its own: these are elsewhere."""
    method = recipe.build_method()
    state = server_state(recipe, method, build_network(recipe, dataset))
    nobody, how = LocalTransport({}), recipe.round
    loop = RoundLoop(method, {}, state, nobody, how)
    if how.buffer is not None:
        loop = OwnPaceEngine(method, {}, state, nobody, how, devices=devices)
    return World(
        recipe,
        method,
        dataset.name,
        dataset.x_test,
        dataset.y_test,
        {},
        {},
        state,
        loop,
        torch.device("cpu"),
    )


def _rows_so_far(world: World, dataset: Dataset, settings: TrainerSettings) -> list[Row]:
    """Take up the run in the folder, or begin anew.

    Depths are fixed when a device begins to train (SuperSFL): those of before come back, whatever
    the registry says by now.
    """
    folder, rounds = settings.folder, world.recipe.train.rounds
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        return []
    if settings.resume:
        check_same_recipe(checkpoint, world)
        checkpoint.restore(world)
        for name, depth in checkpoint.depths.items():
            world.plans[name] = plan_of(world.recipe, world.method, dataset, depth)
        return checkpoint.rows
    if checkpoint.round < checkpoint.recipe["train"]["rounds"]:
        raise ConfigurationError(
            f"{folder}: holds a training that stopped after round {checkpoint.round} of {rounds};"
            " add --resume to go on, or remove the folder"
        )
    discard(folder)
    return []


def _run_id(settings: TrainerSettings, late: LateUpdates) -> str:
    """Of the run that goes on; a run that begins gets one of its own, and owes nothing."""
    path = settings.folder / RUN
    if settings.resume and path.is_file():
        return path.read_text("ascii", "replace").strip()
    late.prune()
    run = secrets.token_hex(8)
    write_atomic(path, f"{run}\n".encode())
    return run


def _delivered(rows: list[Row]) -> set[tuple[str, int]]:
    """(device, round) of the updates that count in these rounds."""
    return {
        (name, row["round"] - row["stale"].get(name, 0))
        for row in rows
        for name in row["participants"]
    }


def _served(world: World) -> Supernet:
    """The one network that all devices and the server answer with."""
    return world.state.merged_network(max(plan.depth for plan in world.plans.values()))


def _finish(
    world: World,
    rows: list[Row],
    settings: TrainerSettings,
    scored: Scored,
    interrupted: list[Samples],
) -> Report:
    recipe, folder = world.recipe, settings.folder
    exits = trained_exits(world, rows)
    run = (folder / RUN).read_text("ascii").strip()
    said: dict[str, str] = {"gate": world.method.gate, "run": run}  # for `splitedge export`
    write_atomic(folder / WEIGHTS, save(_weights(_served(world), exits), said))
    alone = world.method.server_step is not None and not any(row["supervised"] for row in rows)
    summary = summarise(scored.devices, alone=alone)
    report: Report = {
        "method": world.method.name,
        "dataset": world.dataset,
        "seed": recipe.seed,
        "clients": len(world.plans),
        "rounds": rows,
        "final": {
            "accuracy": rows[-1]["accuracy"],
            "accuracy_id": summary.accuracy_id,
            "accuracy_ood": None,
            "accuracy_ood_why": NO_OOD,
            "jain": summary.jain,
            "std": summary.std,
            "answers": "exits" if alone else "full",
        },
        "each_client": [score.to_dict() for score in scored.devices],
        "not_scored": scored.missed,
        "training": training_cost(rows),
        "latency": answer_latency(
            world,
            {score.device: score.whole.samples for score in scored.devices},
            {score.device: 0.0 if alone else 1.0 for score in scored.devices},
        ),
        "energy": fleet_energy(scored.devices),
        "evaluation": {"bytes_down": scored.bytes_down, "seconds": scored.seconds},
        "labels": world.method.labels,
        "privacy": privacy_of(world.method, world.plans, rows, recipe.privacy.delta, interrupted),
        "depths": {name: plan.depth for name, plan in world.plans.items()},
        "exits": exits,
        "weights": str(folder / WEIGHTS),
        "recipe": recipe.to_dict(),
    }
    write_report(folder / REPORT, report)
    return report


def _weights(net: Supernet, exits: list[int]) -> dict[str, Tensor]:
    """All but the exit heads of other depths: they are as they began, and not to be deployed."""
    left_out = tuple(f"exits.{depth}." for depth in net.cuts if depth not in exits)
    return {
        name: tensor.detach().contiguous()
        for name, tensor in net.state_dict().items()
        if not name.startswith(left_out)
    }


def _missed(missed: list[Missed]) -> dict[str, list[dict[str, str]]]:
    """What each device did not answer, and why, in the order asked."""
    by_device: dict[str, list[dict[str, str]]] = {}
    for entry in missed:
        by_device.setdefault(entry.device, []).append({"what": entry.what, "why": entry.why})
    return by_device


def _bytes(net: Supernet) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
