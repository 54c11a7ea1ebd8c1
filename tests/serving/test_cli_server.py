"""`splitedge server …`, and what every command has: help with an example, errors as one line."""

from __future__ import annotations

import json
import queue
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import urllib3

from benchmarks.mqtt.certificates import self_signed
from edge_sdk.bundles.store import BundleStore
from edge_sdk.training.device.first_bundle import wait_for_first_bundle
from server.bench.models import export_random
from server.registry.database import open_registry
from server.tokens import create_token
from tests.commands import Called, Splitedge
from tests.waiting import is_listening, wait_until

pytestmark = pytest.mark.long

SECRET = "a secret of the operator's own"
PROFILE = ("--profile", "raspberry-pi-4")  # measuring takes seconds


def process(*words: object) -> Called:
    """Runs the command as a process."""
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return Called(done.returncode, done.stdout, done.stderr)


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name, member in getattr(command, "commands", {}).items():
        yield from commands(member, (*words, name))


def helps(command: Any) -> Iterator[str]:
    """Each text that the help of a command and of those within it shows."""
    for shown in (command, *command.params):
        yield from filter(None, (getattr(shown, "help", None), getattr(shown, "epilog", None)))
    for member in getattr(command, "commands", {}).values():
        yield from helps(member)


def every_command() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for entry in entry_points(group="splitedge.commands"):
        found += commands(typer.main.get_command(entry.load()), (entry.name,))
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_help_shows_an_example(words: tuple[str, ...], splitedge: Splitedge) -> None:
    shown = splitedge(*words, "--help")
    assert (shown.status, shown.err) == (0, "")
    example = " ".join(shown.out.split()).partition("Example: ")[2]
    assert example.startswith(" ".join(("splitedge", *words)))


def test_no_help_loses_a_word_in_brackets(splitedge: Splitedge) -> None:
    texts = [
        text
        for entry in entry_points(group="splitedge.commands")
        for text in helps(typer.main.get_command(entry.load()))
    ]
    assert not [text for text in texts if "\\[" in text]  # plain text needs no escapes
    assert "see [keep] in agent.toml" in " ".join(splitedge("agent", "--help").out.split())


def test_every_promised_command_is_there() -> None:
    promised = (
        "demo", "bench", "export", "server run", "server token create", "server devices",
        "server revoke", "server audit", "server broker-config", "server models list",
        "server models activate",
        "server models rollback", "server models assign", "server models remove",
        "agent enroll", "agent run", "agent predict",
        "agent status", "agent profile",
    )  # fmt: skip
    assert {tuple(line.split()) for line in promised} <= set(every_command())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("server", "run", "--http", "here"), "--http: expected HOST:PORT, got 'here'"),
        (("server", "run", "--mqtt", "here"), "--mqtt: expected auto"),
        (("server", "run", "--mqtt", "http://here"), "expected mqtt://HOST:PORT"),
        (("server", "run", "--http", "0.0.0.0:0"), "--insecure"),
        (("server", "run", "--mqtt", "embedded:0.0.0.0:0"), "--insecure"),
        (("server", "run", "--tls-cert", "x.pem"), "TLS needs both"),
        (("server", "run", "--mqtt-password-file", "nowhere"), "needs --mqtt mqtt://USER@"),
        (("server", "run", "--batch", "0"), "batch_max: expected a whole number of at least 1"),
        (
            ("server", "run", "--mqtt-packet-bytes", "99"),
            "max_packet_bytes: expected a whole number from 8192 to",
        ),
        (("server", "run", "--mqtt-public", "here"), "expected mqtt://HOST:PORT, got 'here'"),
        (("server", "run", "--mqtt-public", "mqtt://a:b@c"), "leave the login out"),
        (("server", "run", "--allocation", "x"), "allocation: expected one of budget, supersfl"),
        (("server", "devices"), "not the state folder of a server"),
        (("server", "revoke", "pi-1"), "not the state folder of a server"),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, splitedge: Splitedge
) -> None:
    assert message in splitedge(*words, "--state", tmp_path / "server").refusal


@pytest.mark.parametrize("words", [("export",), ("server", "revoke"), ("demo", "--dataset", "x")])
def test_wrong_use_exits_with_2(words: tuple[str, ...], splitedge: Splitedge) -> None:
    called = splitedge(*words)
    assert (called.status, called.out) == (2, "")


def test_export_shows_its_errors_as_all_commands_do(tmp_path: Path, splitedge: Splitedge) -> None:
    words = ["export", "--backbone", "tiny", "--weights", str(tmp_path / "none.safetensors")]
    words += ["--data", "digits", "--out", str(tmp_path), "--name", "digits"]
    assert "none.safetensors: expected a .safetensors file, found none" in splitedge(*words).refusal


def test_login_is_not_sent_over_the_network_in_the_clear(tmp_path: Path) -> None:
    words = ("server", "run", "--state", tmp_path / "server", "--http", "127.0.0.1:0")
    assert "--insecure" in process(*words, "--mqtt", "mqtt://192.0.2.1").refusal


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    create_token(tmp_path / "server")
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "server", "token", "create"]
    command += ["--state", str(tmp_path / "server"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "words", [("run",), ("token", "create"), ("devices",), ("models", "list"), ("revoke", "pi-1")]
)
def test_folder_of_a_device_is_refused_before_anything_is_written(
    words: tuple[str, ...], tmp_path: Path, splitedge: Splitedge
) -> None:
    (tmp_path / "agent.json").write_text("{}")
    refusal = splitedge("server", *words, "--state", tmp_path).refusal
    assert "the state folder of a device; give the server a folder of its own" in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["agent.json"]


def test_a_device_is_pinned_to_a_depth_of_its_own_fleet_s_model(
    tmp_path: Path, splitedge: Splitedge
) -> None:
    state = tmp_path / "server"
    create_token(state)
    registry = open_registry(state)
    for fleet, model, depths in (("shed", "digits", (1, 2)), ("barn", "letters", (1, 4))):
        registry.redeem_token(registry.create_token(fleet), f"pi-{fleet}", {})
        for depth in depths:
            bundle = state / "models" / model / "1" / "bundles" / f"d{depth}"
            bundle.mkdir(parents=True)
            (bundle / "manifest.json").touch()
        registry.catalogue.publish(model, 1)
        registry.catalogue.assign(fleet, model)
    registry.redeem_token(registry.create_token("loft"), "pi-loft", {})
    registry.close()

    def pin(device: str, *words: str) -> Called:
        return splitedge("server", "pin", device, *words, "--state", state)

    assert pin("pi-barn", "--depth", "4").out == "pi-barn is pinned to depth 4\n"
    refused = pin("pi-shed", "--depth", "4").refusal
    assert "--depth 4: the fleet shed runs digits/1, which has no bundle of that depth" in refused
    assert refused.endswith("there are digits/1/d1, digits/1/d2")
    # a fleet that has no model of its own has the one that was published first
    assert pin("pi-loft", "--depth", "2").status == 0
    # a bundle is the operator's own choice
    assert pin("pi-shed", "--bundle", "letters/1/d4").status == 0
    assert "letters/1/d9: no model" in pin("pi-shed", "--bundle", "letters/1/d9").refusal


def test_devices_of_one_fleet_are_listed(tmp_path: Path, splitedge: Splitedge) -> None:
    state = tmp_path / "server"
    create_token(state)
    registry = open_registry(state)
    for name, fleet in (("pi-1", "shed"), ("pi-2", "barn"), ("pi-3", "shed")):
        registry.redeem_token(registry.create_token(fleet), name, {})
    registry.touch("pi-1")
    registry.revoke("pi-3")
    registry.close()
    devices = ("server", "devices", "--state", state, "--fleet", "shed")
    shown = splitedge(*devices).out
    assert "pi-2" not in shown
    assert "now" in shown or "second" in shown  # a busy machine takes one to begin
    for text in ("pi-1", "never", "revoked", "not reported", "no model yet"):
        assert text in shown
    rows = json.loads(splitedge(*devices, "--json").out)
    assert [(row["device"], row["revoked"]) for row in rows] == [("pi-1", False), ("pi-3", True)]
    assert isinstance(rows[0]["last_seen"], float)
    none = splitedge("server", "devices", "--state", state, "--fleet", "yard").out
    assert none.startswith("no devices in fleet yard yet")
    assert "fleet: expected 1 to 63" in splitedge(*devices[:-1], "A Fleet").refusal


def test_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ("server", "run", "--state", tmp_path / "server", "--http", address)
        refusal = process(*words).refusal
        assert f"--http {address}: cannot listen there" in refusal
        assert refusal.endswith("choose another port")


def test_host_that_is_not_this_machines_is_named(tmp_path: Path) -> None:
    for host in ("203.0.113.1", "no-such-host.invalid"):
        words = ("server", "run", "--state", tmp_path / "server", "--http", f"{host}:0")
        assert "its host is no address of this machine" in process(*words, "--insecure").refusal


def test_file_in_place_of_the_state_folder_is_named(tmp_path: Path, splitedge: Splitedge) -> None:
    (tmp_path / "file").touch()
    for words in (("run",), ("token", "create"), ("devices",)):
        refusal = splitedge("server", *words, "--state", tmp_path / "file").refusal
        assert f"--state {tmp_path}/file: a file, not a folder" in refusal


@pytest.mark.deadline
def test_certificate_that_cannot_be_used_stops_the_server_before_anything_is_made(
    tmp_path: Path, splitedge: Splitedge
) -> None:
    cert, key = self_signed(tmp_path)
    (tmp_path / "other").mkdir()
    _, other_key = self_signed(tmp_path / "other")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret"]
    command += ["-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    state, missing = tmp_path / "server", tmp_path / "nope.pem"
    run = ("server", "run", "--http", "127.0.0.1:0", "--mqtt", "auto:127.0.0.1:0")
    for pair, message in [
        ((missing, key), f"--tls-cert {missing}: not found"),
        ((cert, missing), f"--tls-key {missing}: not found"),
        ((tmp_path, key), f"--tls-cert {tmp_path}: cannot be read (Is a directory)"),
        ((key, key), f"--tls-cert {key}: holds no PEM certificate"),
        ((cert, cert), f"--tls-key {cert}: holds no key that fits --tls-cert {cert}"),
        ((cert, other_key), f"--tls-key {other_key}: holds no key that fits --tls-cert {cert}"),
        ((cert, locked), f"--tls-key {locked}: needs a passphrase"),
    ]:
        options = ("--tls-cert", pair[0], "--tls-key", pair[1], "--state", state)
        assert message in splitedge(*run, *options).refusal
        assert not state.exists()


def test_server_lists_and_revokes_what_enrolled(
    exported: Any, run_server: Callable[..., Any], tmp_path: Path, splitedge: Splitedge
) -> None:
    state, pi = tmp_path / "server", tmp_path / "pi"
    exported.install(state / "models")
    server = run_server(state).wait_ready()
    index = urllib3.request("POST", f"{server.http}/v2/repository/index").json()
    assert [(model["name"], model["version"], model["state"]) for model in index] == [
        ("digits", "1", "READY")
    ]
    made = json.loads(splitedge("server", "token", "create", "--state", state, "--json").out)
    assert (made["fleet"], made["expires_in_s"]) == ("default", 3600)
    enroll = ("agent", "enroll", "--server", server.http, "--state", pi, "--name", "pi-1")
    assert splitedge(*enroll, "--token", made["token"], *PROFILE).status == 0
    listed = json.loads(splitedge("server", "devices", "--state", state, "--json").out)
    assert [(row["device"], row["revoked"]) for row in listed] == [("pi-1", False)]
    assert "pi-1" in splitedge("server", "devices", "--state", state).out
    assert "already runs as server" in process("server", "run", "--state", state).refusal
    assert splitedge("server", "revoke", "pi-1", "--state", state).out == "pi-1 is revoked\n"
    assert "pi-2" in splitedge("server", "revoke", "pi-2", "--state", state).refusal
    status = json.loads(splitedge("agent", "status", "--state", pi, "--json").out)
    assert (status["server_answers"], status["offloading"]) == (False, True)


@pytest.mark.deadline
def test_device_of_a_server_without_a_model_enrols_and_waits(
    run_server: Callable[..., Any], tmp_path: Path, splitedge: Splitedge
) -> None:
    state, pi = tmp_path / "server", tmp_path / "pi"
    server = run_server(state).wait_ready()
    token = splitedge("server", "token", "create", "--state", state).out.strip()
    enroll = ("agent", "enroll", "--server", server.http, "--token", token, "--state", pi)
    assert "no bundle yet: the server has no model" in splitedge(*enroll, *PROFILE).out
    refusal = splitedge("agent", "predict", "x.npy", "--state", pi).refusal
    assert "no bundle" in refusal
    assert "splitedge agent run --train DATA" in refusal
    # with `agent run --train` it takes part in training until the server has a model
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    heard: list[Mapping[str, Any]] = []
    waiting = threading.Thread(
        target=wait_for_first_bundle, args=(pi, heard.append, said.put), daemon=True
    )
    waiting.start()
    assert "no bundle yet: training first" in said.get(timeout=20)
    assert "already runs as agent" in splitedge("agent", "run", "--state", pi).refusal
    export_random("tiny", (1, 8, 8), (2,), state / "models")
    waiting.join(60)
    assert not waiting.is_alive(), heard
    assert BundleStore(pi).active().manifest.bundle == "bench-tiny/1/d2"


@contextmanager
def mosquitto_running(words: list[str], port: int) -> Iterator[None]:
    """What `broker-config` says to start."""
    program = shutil.which(words[0]) or shutil.which(words[0], path="/usr/sbin:/usr/local/sbin")
    assert program is not None, "install Mosquitto 2.0 or newer to run the broker tests"
    with subprocess.Popen([program, *words[1:]], stderr=subprocess.PIPE, text=True) as broker:
        try:
            wait_until(lambda: is_listening(port) or broker.poll(), "Mosquitto does not listen")
            assert broker.poll() is None, broker.communicate()[1]
            yield
        finally:
            broker.terminate()
            broker.communicate(timeout=10)


@pytest.mark.broker
def test_own_mosquitto_end_to_end(
    exported: Any,
    run_server: Callable[..., Any],
    free_port: int,
    tmp_path: Path,
    splitedge: Splitedge,
) -> None:
    out, state = tmp_path / "mosquitto", tmp_path / "server"
    exported.install(state / "models")
    written = splitedge("server", "broker-config", "--out", out, "--port", free_port)
    assert (written.status, written.err) == (0, "")
    broker, server = (shlex.split(line) for line in written.out.splitlines())
    password = (out / "backend.password").read_text().strip()
    assert len(password) >= 43  # 256 bits in base64
    assert stat.S_IMODE((out / "backend.password").stat().st_mode) == 0o600
    assert password not in written.out
    assert server[:3] == ["splitedge", "server", "run"]
    with mosquitto_running(broker, free_port):
        served = run_server(state, (*server[3:], "--http", "127.0.0.1:0")).wait_ready()
        assert served.mqtt.port == free_port
        states = [tmp_path / "pi-1", tmp_path / "pi-2"]
        for pi in states:
            token = splitedge("server", "token", "create", "--state", state).out.strip()
            enroll = ("agent", "enroll", "--server", served.http, "--token", token, "--state", pi)
            enrolled = splitedge(*enroll, "--name", pi.name, *PROFILE)
            assert enrolled.status == 0, enrolled.err
        file = tmp_path / "x.npy"
        np.save(file, exported.x[:3])
        predict = ("agent", "predict", file, "--state", states[0], "--threshold", "-1", "--json")
        rows = json.loads(splitedge(*predict, "--deadline", "5").out)
        assert [row["source"] for row in rows] == ["server"] * 3
        assert [row["label"] for row in rows] == exported.logits(exported.x[:3]).argmax(1).tolist()
        _hears_nothing_of_the_other(free_port, states)
    # written again, it keeps password and devices
    again = splitedge("server", "broker-config", "--out", out, "--port", free_port)
    assert again.out == written.out
    assert (out / "backend.password").read_text().strip() == password
    clients = json.loads((out / "dynamic-security.json").read_text())["clients"]
    assert {client["username"] for client in clients} == {"backend", "pi-1", "pi-2"}


def _hears_nothing_of_the_other(port: int, states: list[Path]) -> None:
    """pi-2's credential, asked for pi-1's replies with a client that is not ours."""
    credential = json.loads((states[1] / "agent.json").read_text())["credential"]
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        name, secret = b"pi-2", credential.encode()
        body = b"\x00\x04MQTT\x04\xc2\x00\x3c" + b"".join(
            len(part).to_bytes(2, "big") + part for part in (name, name, secret)
        )
        client.sendall(bytes((0x10, len(body))) + body)
        assert client.recv(4) == b"\x20\x02\x00\x00"  # let in
        granted = []
        for device in (b"pi-1", b"pi-2"):
            topic = b"splitedge/v1/default/" + device + b"/reply"
            body = b"\x00\x01" + len(topic).to_bytes(2, "big") + topic + b"\x01"
            client.sendall(bytes((0x82, len(body))) + body)
            granted.append(client.recv(5)[-1])
        assert granted == [0x80, 1]


def test_password_of_ones_own_is_taken_and_a_wrong_one_refused(
    tmp_path: Path, splitedge: Splitedge
) -> None:
    out, given = tmp_path / "mosquitto", tmp_path / "password"
    config = ("server", "broker-config", "--out", out, "--password-file", given)
    given.write_text(f"{SECRET}\n")
    assert str(given) in splitedge(*config, "--json").out
    assert not (out / "backend.password").exists()
    assert SECRET not in (out / "dynamic-security.json").read_text()
    given.write_text("another\n")
    assert "another credential" in splitedge(*config).refusal
    given.write_text("two\nlines\n")
    assert "expected one line" in splitedge(*config).refusal


def test_password_file_may_be_named_by_the_environment(
    tmp_path: Path, splitedge: Splitedge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITEDGE_MQTT_PASSWORD_FILE", str(tmp_path / "none"))
    run = ("server", "run", "--state", tmp_path / "server", "--mqtt")
    refusal = splitedge(*run, "mqtt://backend@127.0.0.1").refusal
    assert f"{tmp_path / 'none'}: the password cannot be read" in refusal
    # two passwords: which one is meant?
    refusal = splitedge(*run, "mqtt://backend:secret@127.0.0.1").refusal
    assert "--mqtt-password-file needs" in refusal


def test_listener_in_the_clear_off_loopback_must_be_asked_for(
    tmp_path: Path, splitedge: Splitedge
) -> None:
    """FAULTS row 13."""
    config = ("server", "broker-config", "--out", tmp_path / "mosquitto", "--host", "0.0.0.0")
    assert "--insecure" in splitedge(*config).refusal
    shown = json.loads(splitedge(*config, "--insecure", "--json").out)
    # 0.0.0.0 is no address to connect to: the reader puts a name there
    assert "mqtt://backend@HOST:1883" in shown["server"]
