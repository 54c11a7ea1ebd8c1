"""Rounds with real devices: from a recipe and enrolled devices to weights, a log and a report.

    STATE/training/NAME/log.jsonl             one line a round
    STATE/training/NAME/checkpoints/          the last two rounds; --resume continues from there
    STATE/training/NAME/begun.jsonl           under noise: rounds that devices were asked in
    STATE/training/NAME/late/                 updates of past rounds that no round has merged yet
    STATE/training/NAME/run.id                tells this run from another one of that name
    STATE/training/NAME/weights.safetensors   what was learnt, for `splitedge export`
    STATE/training/NAME/report.json

Devices may come and go: one that joins is asked from the next round on; the report names those that
were away.
"""

from __future__ import annotations

import logging
import secrets
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import torch
from fastapi import FastAPI
from torch import nn

from edge_sdk.cli.times import plural
from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.nets.supernet import Supernet
from edge_sdk.service.listening import listen
from edge_sdk.state import StateLock
from edge_sdk.training.data.load import Dataset
from edge_sdk.training.device.warmup import warm_up
from edge_sdk.training.protocol.http import Welcome
from edge_sdk.training.protocol.noise import NO_SCORES
from exporters.composition import Composition
from profiles.allocation import supersfl_latency_ms
from profiles.device import DeviceProfile
from profiles.errors import InvalidProfileError
from server.errors import ServerError
from server.http_server import HttpServer
from server.metrics.training import TrainingMetrics
from server.registry.credentials import secret_sha256
from server.registry.database import Registry, open_registry
from server.registry.location import has_registry
from server.registry.operator import load_operator_secret
from server.registry.records import Device
from server.routes.host_names import checked, own_names
from server.training.fleet.api import create_app
from server.training.fleet.invite import Inviter
from server.training.fleet.late_updates import LateUpdates
from server.training.fleet.mailbox import Mailbox
from server.training.fleet.results import (
    Scored,
    missed_by_device,
    write_results,
)
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.started_rounds import RoundJournal
from server.training.fleet.waiting import waiting_line
from server.training.recipe.recipe import Recipe
from server.training.report.device_scores import ask_scores
from server.training.report.evaluate import predicted_labels
from server.training.report.metrics import Score, score
from server.training.report.report import Report
from server.training.report.rows import row_of
from server.training.rounds.buffered import BufferedLoop
from server.training.rounds.loop import RoundLoop
from server.training.rounds.traffic import TrafficCounter
from server.training.rounds.transport import Transport
from server.training.rounds.workers import ThreadedWorkers
from server.training.run.build import (
    build_network,
    check_depth,
    lay_out,
    load_data,
    plan_of,
    server_state,
    supersfl_depths,
)
from server.training.run.checkpoint import Checkpoint, continue_run, find_checkpoint
from server.training.run.record import OnRound, record_rounds
from server.training.run.run import Row, Run

logger = logging.getLogger(__name__)

RUN_ID: Final = "run.id"
# SuperSFL's 5 s, counted from the latest moment at which the server closes a step.
NO_REPLY_S: Final = 5.0
END_S: Final = 10.0
SAY_AGAIN_S: Final = 30.0
# Heartbeats in the silence after which a device is away: some get lost.
BEATS: Final = 4
# Room for the features of one batch and headers, on top of the weights of the whole network, which
# no update exceeds.
REPLY_SLACK_BYTES: Final = 64_000_000
TEST_BATCH: Final = 512


@dataclass(frozen=True, slots=True)
class _Keys:
    registry: Registry
    operator_sha256: str

    def logged_in(self, device: Device, credential: str) -> None:
        """Do nothing: logins are noted by the server."""


def train(
    recipe: Recipe,
    settings: TrainerSettings,
    *,
    say: Callable[[str], None],
    on_round: OnRound,
    note: Callable[[str], None] = lambda _: None,
) -> Report:
    """Train to the recipe's last round.

    Args:
        say: receives a line when the trainer listens and, while it waits, one every 30 s about the
            devices; and one for each device that takes no part, from threads of the HTTP server.
        on_round: called with each row of the report as it comes.
        note: called with a line about the data that were read.
    Returns: the content of `report.json`.
    Raises: ConfigurationError where recipe, state and settings do not go together; LinkError if
        too few devices join; StateInUseError if this training runs already.
    """
    recipe = replace(recipe, round=recipe.round.with_devices())
    if not has_registry(settings.state):
        raise ConfigurationError(f"{settings.state}: not the state folder of a server")
    with ExitStack() as stack:
        folder = settings.folder
        stack.enter_context(StateLock(folder, "training"))
        registry = open_registry(settings.state)
        stack.callback(registry.close)
        secret = load_operator_secret(settings.state)
        checkpoint = find_checkpoint(
            folder,
            resume=settings.resume,
            force=settings.force,
            otherwise="give the recipe's file another name",
        )
        dataset = load_data(recipe, note)
        first = settings.min_devices or recipe.data.clients
        late = LateUpdates(folder)
        run_id = _resumed_id(settings)
        mailbox = _mailbox(recipe, settings, checkpoint, late, resumed=run_id is not None)
        before = None if checkpoint is None else checkpoint.memory_format
        run = _build_run(recipe, dataset, mailbox, first, before)
        warm_up()
        if checkpoint is not None:
            _restore_plans(run, dataset, checkpoint)
        rows = continue_run(folder, run, checkpoint)
        if run_id is None:
            run_id = _new_id(settings, late)
        started = None
        if run.method.client.noise is not None:
            started = RoundJournal(folder, resume=settings.resume)
        trainer = _Trainer(
            run, dataset, mailbox, registry, settings, late=late, started=started, say=say
        )
        keys, listener = _Keys(registry, secret_sha256(secret)), listen(settings.http)
        metrics = TrainingMetrics(
            settings.name,
            run.method.name,
            rounds=recipe.train.rounds,
            present=lambda: len(mailbox.wait_for_devices(0, 0)),
        )
        trainer_app = trainer.app(keys, run_id)
        trainer_app.include_router(metrics.router(keys, everyone=settings.local))
        names = own_names(listener.address, settings.tls_cert, settings.host_names)
        app = checked(trainer_app, names)
        http = stack.enter_context(HttpServer(app, listener, settings.tls_cert, settings.tls_key))
        if settings.server is not None:
            ask = Inviter(settings.server, secret, http.url, settings.tls_cert)
            stack.enter_context(ask.inviting(registry, mailbox))
        stack.callback(trainer.end_rounds)
        say(f"splitedge train: {http.url}, waiting for {plural(first, 'device')}")
        trainer.gather(first)

        def tell(row: Row) -> None:
            metrics.note_round(row)
            on_round(row)

        record_rounds(
            folder,
            run,
            rows,
            trainer.rounds(rows),
            tell,
            on_saved=trainer.drop_merged_updates,
        )
        trainer.end_rounds()
        scored = trainer.score(len(rows))
        mailbox.end(END_S)
        late.prune()  # no round is left to merge them
        interrupted = [] if started is None else started.interrupted(rows)
        return write_results(folder, run, run_id, rows=rows, scored=scored, interrupted=interrupted)


class _Trainer:
    """Rounds of a run with the devices that have joined."""

    def __init__(
        self,
        run: Run,
        dataset: Dataset,
        mailbox: Mailbox,
        registry: Registry,
        settings: TrainerSettings,
        *,
        late: LateUpdates,
        started: RoundJournal | None,
        say: Callable[[str], None],
    ) -> None:
        self._run = run
        self._dataset = dataset
        self._mailbox = mailbox
        self._registry = registry
        self._settings = settings
        self._late = late
        self._started = started
        self._say = say
        # why a device takes no part, by its name; added to by threads of the HTTP server
        self._absent: dict[str, str] = {}

    def app(self, keys: _Keys, run_id: str) -> FastAPI:
        """The HTTP side for devices."""
        recipe, dataset, settings = self._run.recipe, self._dataset, self._settings
        return create_app(
            self._mailbox,
            keys,
            Welcome(
                training=settings.name,
                run=run_id,
                no_reply_s=recipe.round.step_deadline_s + NO_REPLY_S,
                alive_s=settings.silence_s / BEATS,
                backbone=recipe.train.backbone,
                fine_tuning=self._run.method.fine_tuning,
                class_names=dataset.class_names,
            ),
            tuple(dataset.x_train.shape[1:]),
            reply_bytes_max=self._update_bytes_max() + REPLY_SLACK_BYTES,
            samples_max=recipe.round.samples_max,
            refused=lambda device, why: self._note_absent(device, "refused", why),
            withdrew=lambda device, why: self._note_absent(device, "takes no part", why),
        )

    def _update_bytes_max(self) -> int:
        """Bytes of the largest update: an auxiliary model may be as large as the stages."""
        size = _size_bytes(self._run.state.net)
        return 2 * size if self._run.method.client.shared_auxiliary else size

    def gather(self, count: int) -> None:
        """Wait for devices, and give a plan to those that have none yet.

        Raises: LinkError if fewer than `count` are there in time.
        """
        joined = self._wait(count)
        if len(joined) < count:
            absent = "".join(f"; {name} {why}" for name, why in self._why_absent(joined).items())
            raise LinkError(
                f"expected {count} devices within {self._settings.join_s:g} s, got {len(joined)}"
                f" ({', '.join(joined) or 'none'}){absent}; start"
                " `splitedge agent train` on each device, then run `splitedge train` again,"
                " with --resume"
            )
        plans, recipe = self._run.plans, self._run.recipe
        new = [name for name in joined if name not in plans]
        profiles = {name: self._profile(name) for name in {*new, *plans}}
        net, method = self._run.state.net, self._run.method
        depths = choose_depths(recipe.train.depth, net, profiles)
        for name in new:
            depth = net.L if method.client.whole else depths[name]
            plans[name] = plan_of(recipe, method, self._dataset, depth)
            logger.info("device=%s depth=%d takes part", name, depth)
        ordered = sorted(plans.items())  # floats are added in this order
        plans.clear()
        plans.update(ordered)

    def _wait(self, count: int) -> list[str]:
        """Devices that are there, at the end of the wait; the user is told whom it is for."""
        end = time.monotonic() + self._settings.join_s
        while True:
            left_s = max(0.0, end - time.monotonic())
            joined = self._mailbox.wait_for_devices(count, min(left_s, SAY_AGAIN_S))
            if len(joined) >= count or left_s <= SAY_AGAIN_S:
                return joined
            left_s = end - time.monotonic()
            try:
                enrolled = self._registry.devices()
            except ServerError as err:  # the database is busy or away; training needs it later
                logger.warning("waiting for devices: %s", err)
                continue
            absent = self._why_absent(joined)
            line = waiting_line(count, left_s, joined, enrolled, absent)
            self._say(f"splitedge train: {line}")

    def rounds(self, rows: list[Row]) -> Iterator[Row]:
        """Run the rounds that are left, one at each iteration, and append their rows to `rows`."""
        for number in range(len(rows) + 1, self._run.recipe.train.rounds + 1):
            rows.append(self._round(number))
            yield rows[-1]

    def drop_merged_updates(self) -> None:
        """Remove the files of late updates that the last checkpoint holds as merged."""
        self._late.prune(self._mailbox.kept)

    def end_rounds(self) -> None:
        """Stop waiting for devices at work, and forget which messages they have missed."""
        self._mailbox.end_rounds()
        self._run.loop.close()
        self._mailbox.take_missed()

    def score(self, number: int) -> Scored:
        """Scores of the weights after the last round, by the devices that are still there."""
        run = self._run
        if run.method.client.noise is not None:  # they would refuse
            why = [{"what": "evaluate", "why": NO_SCORES}]
            return Scored([], dict.fromkeys(run.plans, why), 0, 0.0)
        profiles = {name: self._profile(name) for name in run.plans}
        traffic, start = TrafficCounter(), time.perf_counter()
        scores = ask_scores(run, self._mailbox, profiles, number, traffic)
        missed = missed_by_device(self._mailbox.take_missed())
        return Scored(scores, missed, traffic.down, time.perf_counter() - start)

    def _round(self, number: int) -> Row:
        run, recipe = self._run, self._run.recipe
        wanted = recipe.round.buffer or len(run.plans)
        self.gather(recipe.round.quorum_of(wanted))
        if self._started is not None:
            self._started.begin(number, run.plans, self._mailbox.samples())
        run.loop.set_clients(run.plans, self._mailbox)
        late = self._mailbox.take_late()
        result = run.loop.run_round(number, recipe.seed, late)
        self._mailbox.put_back_late({n: update for n, update in late.items() if result.keeps(n)})
        # where devices keep the last layer, the server's own is untrained
        measured = run.measures(number) and not run.method.client.own_back
        accuracy = self._accuracy() if measured else None
        missed = missed_by_device(self._mailbox.take_missed())
        failures = {name: entries[-1]["why"] for name, entries in missed.items()}
        failures |= self._why_absent(self._mailbox.wait_for_devices(0, 0))
        return row_of(result, accuracy, "full", failures) | {
            "missed": missed,
            "dropped": self._mailbox.take_counts(),
        }

    def _accuracy(self) -> float:
        """Accuracy of device and server together, the mean over the devices.

        It is measured on a copy, because devices may be training the network now.
        """
        run = self._run
        with run.loop.paused():
            halves = Composition(run.state.net, run.state.trunk).frozen()
        depths = [plan.depth for plan in run.plans.values()]
        if halves.server is halves.device:  # one network, wherever it is cut
            return self._score(halves.device).accuracy
        scores = {depth: self._score(halves.whole(depth)) for depth in set(depths)}
        return statistics.fmean(scores[depth].accuracy for depth in depths)

    def _score(self, net: nn.Module) -> Score:
        labels = predicted_labels(net, self._run.x_test, self._run.device, TEST_BATCH)
        return score(labels, self._run.y_test)

    def _profile(self, name: str) -> DeviceProfile:
        return DeviceProfile.from_dict(self._registry.device(name).profile)

    def _note_absent(self, device: str, how: str, why: str) -> None:
        known = f"{how}: {why}"
        if self._absent.get(device) != known:  # it may try again and again
            self._absent[device] = known
            self._say(f"splitedge train: {device} {known}")

    def _why_absent(self, joined: Collection[str]) -> dict[str, str]:
        """Reasons of the devices that are known to take no part, by name."""
        known = sorted(self._absent.copy().items())
        return {name: why for name, why in known if name not in joined}


def choose_depths(
    fixed: int | None, net: Supernet, profiles: Mapping[str, DeviceProfile]
) -> dict[str, int]:
    """A depth for each device: the recipe's own, or SuperSFL's Eq. 1 with the devices' profiles.

    A device with a link that was never measured counts as the slowest.

    Raises: ConfigurationError if the recipe's depth is no cut.
    """
    if fixed is not None:
        check_depth(net, fixed)
        return dict.fromkeys(profiles, fixed)
    measured: dict[str, float] = {}
    for name, profile in profiles.items():
        try:
            measured[name] = supersfl_latency_ms(profile)
        except InvalidProfileError as err:
            logger.warning("device=%s counts as the slowest: %s", name, err)
    slowest = max(measured.values(), default=0.0)
    memory_gb = [profile.memory_total_gb for profile in profiles.values()]
    latency_ms = [measured.get(name, slowest) for name in profiles]
    return dict(zip(profiles, supersfl_depths(net, memory_gb, latency_ms), strict=True))


def _build_run(
    recipe: Recipe,
    dataset: Dataset,
    transport: Transport,
    devices: int,
    before: ChosenFormat | None,
) -> Run:
    """The recipe's run, without plans: devices get them as they join.

    Args:
        devices: expected for the first round.
        before: the memory format of a resumed run's earlier rounds.
    """
    method, settings = recipe.built_method, recipe.round
    net = build_network(recipe, dataset)
    chosen = lay_out(net, recipe, before=before)
    state = server_state(recipe, method, net)
    loop: RoundLoop | BufferedLoop
    if settings.buffer is None:
        loop = RoundLoop(method, {}, state, transport, settings)
    else:
        workers = ThreadedWorkers()
        loop = BufferedLoop(
            method, {}, state, transport, settings, workers=workers, clients=devices
        )
    return Run(
        recipe=recipe,
        method=method,
        dataset=dataset.name,
        class_names=dataset.class_names,
        x_test=dataset.x_test,
        y_test=dataset.y_test,
        plans={},
        state=state,
        loop=loop,
        device=torch.device("cpu"),
        memory_format=chosen,
    )


def _restore_plans(run: Run, dataset: Dataset, checkpoint: Checkpoint) -> None:
    """Plans of the depths that devices began with (SuperSFL), whatever the registry says by now."""
    for name, depth in checkpoint.depths.items():
        run.plans[name] = plan_of(run.recipe, run.method, dataset, depth)


def _mailbox(
    recipe: Recipe,
    settings: TrainerSettings,
    checkpoint: Checkpoint | None,
    late: LateUpdates,
    *,
    resumed: bool,
) -> Mailbox:
    """The mailbox of a run, with the late updates of a resumed one that no round has merged."""
    past = [] if checkpoint is None else checkpoint.rows
    merged = _delivered([row for row in past if row["merged"]])
    return Mailbox(
        _delivered(past),
        late=late.load(merged) if resumed else {},
        keep=late.keep,
        lockstep=recipe.round.buffer is None,
        silence_s=settings.silence_s,
    )


def _resumed_id(settings: TrainerSettings) -> str | None:
    """Id of the run that is resumed; None for a new run."""
    path = settings.folder / RUN_ID
    resumed = settings.resume and path.is_file()
    return path.read_text("ascii", "replace").strip() if resumed else None


def _new_id(settings: TrainerSettings, late: LateUpdates) -> str:
    """Id of a new run, written to its folder; late updates of another run are dropped."""
    late.prune()
    run_id = secrets.token_hex(8)
    write_atomic(settings.folder / RUN_ID, f"{run_id}\n".encode())
    return run_id


def _delivered(rows: list[Row]) -> set[tuple[str, int]]:
    """(device, round) of the updates that were heard in these rounds."""
    return {
        (name, row["round"] - row["stale"].get(name, 0))
        for row in rows
        for name in row["participants"]
    }


def _size_bytes(net: Supernet) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
