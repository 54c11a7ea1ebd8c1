"""The watch over a fleet: real registries, a real webhook over HTTP, a real broker."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import re
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.answers.tally import UNCERTAINTY_BINS
from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.manifest import BundleManifest
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.state import StateLock
from edge_sdk.wire.broker_address import BrokerAddress
from profiles import load_reference
from server.alerts.limits import AlertLimits
from server.alerts.senders import Sender, WebhookWriter, open_senders, signed
from server.alerts.trainings import TrainingFacts, running_trainings
from server.alerts.watch import AlertWatch, manifest_reader
from server.errors import ArtifactError, BadRequestError
from server.registry.alerts.alert import Alert, Changes, Finding
from server.registry.alerts.notices import WAITING_MOST
from server.registry.database import Registry
from server.registry.telemetry.history import LastReading
from server.registry.telemetry.reading import Reading
from tests.commands import Splitedge
from tests.edge.brokers import Inbox, Mosquitto
from tests.reader import Document, Reader
from tests.serving.conftest import Exported
from tests.waiting import wait_until

NOON = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(registry_url: str, clock: Clock) -> Iterator[Registry]:
    """With the device pi-1, heard at noon."""
    opened = Registry.open(registry_url, clock=clock)
    opened.redeem_token(opened.create_token(), "pi-1", load_reference("raspberry-pi-4").to_dict())
    opened.touch("pi-1")
    yield opened
    opened.close()


class Receiver:
    """A receiver of alerts, which may be away."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.away = False

    def write(self, rows: Sequence[dict[str, Any]]) -> int:
        """Take the first message."""
        if self.away:
            raise LinkError("away")
        self.told.append((rows[0]["state"], rows[0]["kind"], rows[0]["about"]))
        assert set(rows[0]) == {"alert", "state", "kind", "about", "level", "text", "since"}
        return 1

    def close(self, timeout_s: float) -> int:
        """Nothing is held, and nothing is lost."""
        return 0

    def senders(self) -> dict[str, Sender]:
        """The senders of one run of a watch, with this receiver only."""
        return {"webhook": Sender("webhook", self)}

    def wait_for(self, *messages: tuple[str, str, str]) -> None:
        """Wait until it has exactly these messages: states, kinds and subjects."""
        wait_until(lambda: len(self.told) >= len(messages), lambda: self.told)
        assert self.told == list(messages)


def test_the_document_shows_the_defaults() -> None:
    text = Document("docs/alerts.md").text.partition("```toml\n")[2].partition("```")[0]
    written = tomllib.loads(text.partition("# and by default")[0])
    assert AlertLimits(**written) == AlertLimits()
    AlertLimits(**tomllib.loads(text) | {"webhook_secret": Path("secret")})


def watch_over(
    registry: Registry, clock: Clock, senders: Mapping[str, Sender] | None = None, **more: Any
) -> AlertWatch:
    more = {"manifests": lambda _: None, "signing": list, **more}
    limits = more.pop("limits", AlertLimits())
    return AlertWatch(registry, limits, senders or {}, clock=clock, now=clock, **more)


def heartbeat(registry: Registry, at: float, counts: tuple[int, int, int], **more: Any) -> None:
    names = ("exits", "offloads", "fallbacks")
    reading = Reading(run="a", counts=dict(zip(names, counts, strict=True)), **more)
    registry.telemetry.record({"pi-1": LastReading(at, reading)})


def test_alerts_open_once_survive_a_restart_and_close(registry: Registry, clock: Clock) -> None:
    receiver = Receiver()
    watch = watch_over(registry, clock, receiver.senders())
    watch.look()
    assert registry.alerts.open() == []
    clock.now += 301
    watch.look()
    watch.look()
    (alert,) = registry.alerts.open()
    assert (alert.kind, alert.about, alert.opened_at) == ("silent", "pi-1", clock.now)
    receiver.wait_for(("open", "silent", "pi-1"))
    watch.close()
    # another process takes over; it listens only from now on
    watch = watch_over(registry, clock, receiver.senders())
    clock.now += 301
    watch.look()
    assert [one.id for one in registry.alerts.open()] == [alert.id]
    # an alert names its device as people do
    before = registry.alerts.open()[0].text
    registry.titles.give("pi-1", "Gate")
    watch.look()
    (renamed,) = registry.alerts.open()
    assert (renamed.id, renamed.text) == (alert.id, f"Gate: {before}")
    registry.touch("pi-1")
    watch.look()
    assert registry.alerts.open() == []
    (over,) = registry.alerts.recent()
    assert over.closed_at == clock.now
    receiver.wait_for(("open", "silent", "pi-1"), ("closed", "silent", "pi-1"))
    watch.close()


def test_fallbacks_agreement_and_refusals_are_seen_in_what_devices_report(
    registry: Registry, clock: Clock
) -> None:
    registry.reports.note_update("pi-1", "digits/1/d2", "digits/2/d2", "golden inputs differ")
    heartbeat(registry, clock.now, (0, 0, 0))
    clock.now += 30
    gauges = {"agreement_delta": 0.05, "audits": 500.0}
    heartbeat(registry, clock.now, (10, 20, 20), gauges=gauges)
    watch = watch_over(registry, clock, signing=lambda: ["the root expired on 2026-01-01"])
    watch.look()
    found = {(one.kind, one.about, one.level) for one in registry.alerts.open()}
    assert found == {
        ("fallbacks", "pi-1", "warning"),
        ("agreement", "pi-1", "warning"),
        ("refused", "pi-1", "warning"),
        ("signing", "server", "critical"),
    }
    registry.revoke("pi-1")  # what is about it closes
    watch.look()
    assert [one.kind for one in registry.alerts.open()] == ["signing"]


def test_a_drift_is_seen_in_the_history(
    registry: Registry, clock: Clock, exported: Exported
) -> None:
    manifest = BundleManifest.load(exported.folder / "bundles" / "d2")
    largest = 2.302585092994046
    sure = [0] * UNCERTAINTY_BINS
    common = {"bundle": "digits/1/d2", "largest": largest, "since": "ab"}
    heartbeat(registry, clock.now, (0, 0, 0), uncertainty=tuple(sure), **common)
    read = manifest_reader(exported.root)
    assert read("digits/1/d2") == manifest
    assert read("digits/9/d2") is None
    watch = watch_over(registry, clock, manifests=read)
    clock.now += 30
    sure[0] = 400  # this weak network was never so sure
    heartbeat(registry, clock.now, (400, 0, 0), uncertainty=tuple(sure), **common)
    registry.touch("pi-1")
    watch.look()
    (alert,) = registry.alerts.open()
    assert alert.kind == "drift"
    assert "more sure than on the held-out samples" in alert.text
    assert "over 400 answers" in alert.text
    clock.now += 60
    watch.look()  # not looked at again yet: the alert stays
    assert [one.kind for one in registry.alerts.open()] == ["drift"]


def test_a_trainer_that_stands_still_opens_an_alert_until_a_round_ends(
    registry: Registry, clock: Clock, tmp_path: Path
) -> None:
    yard, over = tmp_path / "yard", tmp_path / "over"
    StateLock(over, "training").release()
    with StateLock(yard, "training"):
        log = yard / "log.jsonl"
        log.write_text('{"seconds": 20.5}\n{"seconds": 12.0}\n{"half a li')
        for path in (log, yard / "training.lock"):
            os.utime(path, (NOON, NOON))
        assert running_trainings(tmp_path) == [TrainingFacts("yard", NOON, (20.5, 12.0))]
        watch = watch_over(registry, clock, trainings=partial(running_trainings, tmp_path))
        clock.now += 1801
        registry.touch("pi-1")
        watch.look()
        (alert,) = registry.alerts.open()
        assert (alert.kind, alert.about) == ("training", "yard")
        assert "no round has ended for 30 minutes (its last round took 12 seconds)" in alert.text
        os.utime(log, (clock.now, clock.now))
        watch.look()
        assert registry.alerts.open() == []
        clock.now += 1801
        registry.touch("pi-1")
        watch.look()
        assert [one.kind for one in registry.alerts.open()] == ["training"]
    watch.look()  # the trainer has ended
    assert registry.alerts.open() == []


def test_secrets_that_others_can_read_are_named(tmp_path: Path) -> None:
    state = tmp_path / "server"
    state.mkdir(mode=0o755)
    (state / "alerts.toml").write_text('mqtt = "mqtt://me:word@host/topic"\n')
    (state / "alerts.toml").chmod(0o644)
    assert AlertLimits.load(state).open_secrets(state) == [state / "alerts.toml"]
    (state / "alerts.toml").chmod(0o600)
    assert AlertLimits.load(state).open_secrets(state) == []
    (state / "alerts.toml").chmod(0o644)
    state.chmod(0o700)  # nobody else gets at it
    assert AlertLimits.load(state).open_secrets(state) == []
    state.chmod(0o755)
    (state / "alerts.toml").write_text('mqtt = "mqtt://host/topic"\nsilent_s = 90\n')
    assert AlertLimits.load(state).open_secrets(state) == []
    (state / "key").write_text("0123456789abcdef")
    (state / "key").chmod(0o640)
    limits = AlertLimits(webhook="https://host/x", webhook_secret=Path("key"))
    (state / "alerts.toml").chmod(0o600)
    assert limits.open_secrets(state) == [state / "key"]


def test_the_secret_in_a_webhook_is_told_nobody() -> None:
    writer = WebhookWriter("http://me:word@127.0.0.1:9/services/T0/secret?key=more")
    with pytest.raises(LinkError, match=r"^http://127\.0\.0\.1:9: cannot be reached") as away:
        writer.write([{"alert": 1}])
    writer.close(0.0)
    with pytest.raises(ConfigurationError, match="got 'ftp://host'") as wrong:
        AlertLimits(webhook="ftp://me:word@host/secret?key=more")
    with pytest.raises(ConfigurationError, match="got 'host'"):
        AlertLimits(webhook="host/secret")
    for text in (str(away.value), str(wrong.value)):
        assert not {"word", "secret", "more"} & set(re.split(r"\W+", text))


def test_damaged_signing_metadata_hide_no_other_alert(registry: Registry, clock: Clock) -> None:
    def damaged() -> list[str]:
        raise ArtifactError("root: cannot be read; restore it")

    watch = watch_over(registry, clock, signing=damaged)
    clock.now += 400
    watch.look()
    found = {one.kind: one for one in registry.alerts.open()}
    assert set(found) == {"silent", "signing"}
    assert (found["signing"].level, found["signing"].about) == ("critical", "server")
    assert "restore it" in found["signing"].text


@pytest.mark.parametrize("text", ["expired, " * 100, "two  spaces\nand a line", "x" * 399 + " y"])
def test_a_text_that_the_registry_cuts_or_folds_is_written_once(
    registry: Registry, clock: Clock, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Each time more would be a synced write, every ten seconds, on a memory card."""
    watch = watch_over(registry, clock, signing=lambda: [text])
    apply, told = registry.alerts.apply, []

    def noted(new: Changes) -> tuple[list[Alert], list[Alert]]:
        told.append(new)
        return apply(new)

    monkeypatch.setattr(registry.alerts, "apply", noted)
    watch.look()
    watch.look()
    first, second = told
    assert [one.kind for one in first.opening] == ["signing"]
    assert (list(second.opening), list(second.closing), dict(second.telling)) == ([], [], {})


def test_a_restart_tells_what_was_not_told_and_nothing_twice(
    registry: Registry, clock: Clock
) -> None:
    receiver = Receiver()
    watch = watch_over(registry, clock, receiver.senders(), signing=lambda: ["the root ends"])
    watch.look()
    receiver.wait_for(("open", "signing", "server"))
    receiver.away = True
    clock.now += 400
    watch.look()
    watch.close()  # a message waits
    assert [one.state for one in registry.notices.waiting("webhook")] == ["open"]
    receiver.away = False
    registry.touch("pi-1")  # its cause has passed while the server was not running
    watch = watch_over(registry, clock, receiver.senders(), signing=lambda: ["the root ends"])
    watch.look()
    receiver.wait_for(
        ("open", "signing", "server"), ("open", "silent", "pi-1"), ("closed", "silent", "pi-1")
    )
    watch.close()
    assert registry.notices.waiting("webhook") == []
    # without the receiver, and with it again: it is a new one, which is told what is open
    watch_over(registry, clock, {}, signing=lambda: ["the root ends"]).look()
    watch = watch_over(registry, clock, receiver.senders(), signing=lambda: ["the root ends"])
    watch.look()
    wait_until(lambda: len(receiver.told) == 4, lambda: receiver.told)
    assert receiver.told[3] == ("open", "signing", "server")
    watch.close()


def test_messages_that_wait_too_long_are_given_up_oldest_first(
    registry: Registry, clock: Clock
) -> None:
    many = [Finding("silent", f"d{number}", "x") for number in range(WAITING_MOST + 3)]
    registry.alerts.apply(Changes(opening=many))
    registry.notices.make(["webhook"])
    waiting = registry.notices.waiting("webhook")
    assert [waiting[0].alert.about, len(waiting)] == ["d3", WAITING_MOST]
    assert registry.notices.waiting("webhook") == waiting
    registry.notices.make(["webhook"])  # those that were given up are not made again
    assert registry.notices.waiting("webhook") == waiting


def test_an_alert_under_a_silence_is_told_if_it_is_open_when_the_silence_ends(
    registry: Registry, clock: Clock
) -> None:
    receiver = Receiver()
    watch = watch_over(registry, clock, receiver.senders())
    clock.now += 400
    watch.look()
    receiver.wait_for(("open", "silent", "pi-1"))
    (first,) = registry.alerts.silence("", "pi-1", 3600.0)
    registry.touch("pi-1")
    watch.look()  # the receiver was told that it is open, so it is told the end too
    receiver.wait_for(("open", "silent", "pi-1"), ("closed", "silent", "pi-1"))
    clock.now += 400
    watch.look()
    assert registry.alerts.open()[0].is_silenced(clock.now)
    assert len(registry.alerts.recent()) == 2
    registry.touch("pi-1")
    watch.look()  # opened and ended under the silence: nobody is told
    clock.now += 400
    watch.look()
    assert {one.alert.id for one in registry.notices.waiting("webhook")} <= {first.id}
    clock.now += 3600  # the silence is over, and the device is silent still
    watch.look()
    receiver.wait_for(
        ("open", "silent", "pi-1"), ("closed", "silent", "pi-1"), ("open", "silent", "pi-1")
    )
    watch.close()


def test_silence_holds_over_a_new_opening_and_is_audited(registry: Registry, clock: Clock) -> None:
    watch = watch_over(registry, clock)
    clock.now += 400
    watch.look()
    assert [one.kind for one in registry.alerts.silence("", "pi-1", 3600.0)] == ["silent"]
    with pytest.raises(BadRequestError, match="no open alert of the kind drift"):
        registry.alerts.silence("drift", "pi-1", 60.0)
    registry.touch("pi-1")
    watch.look()
    clock.now += 400
    watch.look()
    (again,) = registry.alerts.open()
    assert again.is_silenced(clock.now)
    registry.alerts.silence("silent", "pi-1", 0.0)
    assert registry.alerts.open()[0].silenced_until is None
    registry.touch("pi-1")
    watch.look()
    clock.now += 400
    watch.look()  # the silence that was ended does not come back with the next alert
    assert registry.alerts.open()[0].silenced_until is None
    kinds = [(one.what, one.who, one.detail) for one in registry.trail.entries(what="alert.")]
    assert kinds == [
        ("alert.hear", "operator", "pi-1: silent"),
        ("alert.silence", "operator", "pi-1: silent for 3600 s"),
    ]


def test_old_alerts_are_dropped_and_open_ones_stay(registry: Registry, clock: Clock) -> None:
    for number in range(5):
        opened, _ = registry.alerts.apply(Changes(opening=[Finding("silent", f"d{number}", "x")]))
        if number < 4:
            registry.alerts.apply(Changes(closing=opened))
    assert registry.alerts.prune(rows=2) == 2
    assert [one.about for one in registry.alerts.recent()] == ["d4", "d3", "d2"]
    clock.now += 91 * 86_400
    assert registry.alerts.prune(age_s=math.inf) == 0
    assert registry.alerts.prune() == 2
    assert [one.about for one in registry.alerts.recent()] == ["d4"]


class Hook:
    """A webhook that fails twice, and takes what comes then."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.attempts = 0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.attempts += 1
                failing = hook.attempts <= 2
                if not failing:
                    hook.got.append((dict(self.headers), body))
                self.send_response(503 if failing else 204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing: the test asserts."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/alerts"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.deadline
def test_a_webhook_gets_every_alert_signed_even_if_it_was_away(
    registry: Registry, clock: Clock, tmp_path: Path
) -> None:
    secret = b"0123456789abcdef"
    (tmp_path / "secret").write_bytes(secret + b"\n")
    with closing(Hook()) as hook:
        limits = AlertLimits(webhook=hook.url, webhook_secret=Path("secret"))
        senders = open_senders(limits, tmp_path)
        with closing(watch_over(registry, clock, senders, limits=limits)) as watch:
            clock.now += 400
            watch.look()
            registry.touch("pi-1")
            watch.look()
            wait_until(lambda: len(hook.got) == 2, lambda: hook.attempts)
    bodies = [json.loads(body) for _, body in hook.got]
    assert [(one["state"], one["kind"], one["about"]) for one in bodies] == [
        ("open", "silent", "pi-1"),
        ("closed", "silent", "pi-1"),
    ]
    headers, body = hook.got[0]
    at = headers["Splitedge-Time"]
    digest = hmac.new(secret, at.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert headers["Splitedge-Signature"] == f"sha256={digest}"
    assert signed(b"{}", secret, 12.9)["Splitedge-Time"] == "12"
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="at least 16 characters, got 5"):
        open_senders(limits, tmp_path)


@pytest.mark.broker
@pytest.mark.deadline
def test_a_topic_gets_every_alert(
    registry: Registry, clock: Clock, tmp_path: Path, free_port: int
) -> None:
    broker = Mosquitto(tmp_path, free_port)
    broker.start()
    inbox = Inbox()
    link = MqttLink(BrokerAddress("127.0.0.1", free_port), client_id="ops", username="")
    link.subscribe("ops/alerts", inbox)
    link.start()
    try:
        link.wait_connected(10)
        limits = AlertLimits(mqtt=f"mqtt://127.0.0.1:{free_port}/ops/alerts")
        clock.now += 400
        senders = open_senders(limits, tmp_path)
        with closing(watch_over(registry, clock, senders, limits=limits)) as watch:
            clock.now += 400
            watch.look()
            (message,) = inbox.wait(1)
        assert json.loads(message.payload)["text"].startswith("last heard 13 minutes ago")
    finally:
        link.stop()
        broker.stop()


def test_the_command_shows_and_silences(splitedge: Splitedge, tmp_path: Path) -> None:
    state = tmp_path / "server"
    state.mkdir()
    with closing(Registry.open(f"sqlite:///{state / 'registry.db'}")) as registry:
        registry.alerts.apply(Changes(opening=[Finding("silent", "pi-1", "last heard never")]))
    typed = Reader(tmp_path).shell(Document("docs/alerts.md").snippet("show"))
    assert "last heard never" in typed
    (shown,) = splitedge("server", "alerts", "--json", "--state", state).json
    assert (shown["kind"], shown["closed_at"]) == ("silent", None)
    assert "last heard never" in splitedge("server", "alerts", "--state", state).out
    done = splitedge("server", "alerts", "silence", "pi-1", "--for", "8h", "--state", state)
    assert done.out == "silent of pi-1 is silenced\n"
    assert "silenced" in splitedge("server", "alerts", "--closed", "--state", state).out
    assert splitedge("server", "alerts", "hear", "pi-1", "--state", state).out == (
        "silent of pi-1 is heard again\n"
    )
    missing = splitedge("server", "alerts", "hear", "pi-2", "--state", state)
    assert "no open alert" in missing.refusal
