"""`splitedge server run` as people run it: how it starts, refuses to, restarts and ends."""

from __future__ import annotations

import datetime as dt
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.messages import Query
from profiles import load_reference
from server.registry.operator import load_operator_secret
from server.run import Addresses
from tests.waiting import is_listening, wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Device, Exported, ServerRun

pytestmark = [pytest.mark.broker, pytest.mark.deadline, pytest.mark.long]

FREE = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")


def error_line(server: ServerRun) -> str:
    """The one line that a server which does not start must say; its exit status is 1."""
    assert server.end(signal.SIGCONT) == 1  # SIGCONT: let it end by itself
    (line,) = [line for line in server.stderr.splitlines() if " INFO " not in line]
    assert line.startswith("error: "), line
    return line


def gone(family: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(family, timeout=5)
    return not alive


def test_restart_keeps_ports_models_and_devices_and_sigterm_leaves_nothing(
    run_server: Callable[..., ServerRun],
    exported: Exported,
    tmp_path: Path,
    device: Callable[..., Device],
) -> None:
    state = tmp_path / "state"
    server = run_server(state).wait_ready()
    assert server.call("GET", "/v2/health/live").status == 200
    assert server.call("GET", "/v2/health/ready").status == 503
    exported.install(state / "models")
    token = _token(state)
    body = {
        "token": token.split(".")[0],
        "name": "pi-1",
        "profile": load_reference("raspberry-pi-4").to_dict(),
    }
    enrolled = server.call("POST", "/api/v1/enroll", json=body)
    assert enrolled.status == 201, enrolled.data
    pi = device(server.mqtt, "pi-1", enrolled.json()["credential"])
    wait_until(lambda: server.call("GET", "/v2/health/ready").status == 200, "not ready", 5)
    answer = pi.ask(exported.query(0, exported.x[:1], id="before"))
    assert answer.problem is None

    http, mqtt, family = server.http, server.mqtt, server.family
    assert len(family) == 2  # itself and the broker
    began = time.monotonic()
    assert server.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 5
    assert gone(family)
    assert "Traceback" not in server.stderr
    assert not (state / "registry.db-wal").exists()  # all of it is in the database

    again = run_server(state, ()).wait_ready()
    assert (again.http, again.mqtt) == (http, mqtt)
    pi.link.wait_connected(10)
    answer = pi.ask(exported.query(0, exported.x[:1], id="after"))
    assert answer.tensors["logits"].argmax() == exported.logits(exported.x[:1]).argmax()

    family = again.family
    assert again.end(signal.SIGKILL) == -signal.SIGKILL
    assert gone(family)  # the broker went with it
    killed = run_server(state, ()).wait_ready()
    assert (killed.http, killed.mqtt) == (http, mqtt)
    pi.link.wait_connected(10)
    assert pi.ask(Query("probe", None, None, None)).problem is None
    assert killed.end(signal.SIGINT) == 0
    assert "Traceback" not in killed.stderr


def test_with_log_json_every_line_is_an_object(
    run_server: Callable[..., ServerRun], tmp_path: Path
) -> None:
    server = run_server(tmp_path / "state", (*FREE, "--log", "json")).wait_ready()
    # a child that has something to say says it in the same form: it reads this when it starts
    assert all(child.environ()["SPLITEDGE_LOG"] == "json" for child in server.family[1:])
    assert server.end() == 0
    lines = [json.loads(line) for line in server.stderr.splitlines()]
    assert {line["pid"] for line in lines} == {server.process.pid}
    assert any("registry: made" in line["message"] for line in lines)


def test_a_taken_port_is_one_clear_line(
    run_server: Callable[..., ServerRun], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--http", f"127.0.0.1:{port}", "--mqtt", "embedded:127.0.0.1:0")
        http = run_server(tmp_path / "one", options)
        options = ("--http", "127.0.0.1:0", "--mqtt", f"embedded:127.0.0.1:{port}")
        mqtt = run_server(tmp_path / "two", options)
        assert f"--http 127.0.0.1:{port}: cannot listen there" in error_line(http)
        line = error_line(mqtt)
    assert f"cannot listen on 127.0.0.1 port {port}" in line
    other = port + 1 if port < 65_535 else 1884
    assert f"with --mqtt auto:127.0.0.1:{other}, or use the broker" in line
    assert f"there already with --mqtt mqtt://127.0.0.1:{port}" in line


def test_what_devices_were_told_and_given_is_kept_over_restarts(
    run_server: Callable[..., ServerRun], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    options = ("--allocation", "supersfl", "--mqtt-public", "mqtt://edge.example:1883")
    first = run_server(state, (*FREE, *options, "--mqtt-packet-bytes", "130000")).wait_ready()
    mqtt = first.mqtt
    enrolled = first.call(
        "POST",
        "/api/v1/enroll",
        json={
            "token": _token(state).split(".")[0],
            "profile": load_reference("raspberry-pi-4").to_dict(),
        },
    ).json()
    assert enrolled["broker"] == {"url": "mqtt://edge.example:1883", "max_packet_bytes": 130_000}
    first.end()
    kept = Addresses.load(state)
    assert kept is not None
    assert (kept.allocation, kept.mqtt_public) == ("supersfl", "mqtt://edge.example:1883")

    second = run_server(state, ()).wait_ready()
    assert second.mqtt == mqtt  # where it listens, not what devices are told
    second.end()
    assert Addresses.load(state) == kept
    third = run_server(state, ("--allocation", "budget", "--mqtt-public", "")).wait_ready()
    third.end()
    assert Addresses.load(state) == replace(kept, allocation="budget", mqtt_public=None)


def test_addresses_of_an_earlier_release_are_read(tmp_path: Path) -> None:
    text = '{"http": "127.0.0.1:8000", "mqtt": "embedded:127.0.0.1:1883"}'
    (tmp_path / "addresses.json").write_text(text)
    assert Addresses.load(tmp_path) == Addresses("127.0.0.1:8000", "embedded:127.0.0.1:1883")


def test_a_second_server_on_one_state_is_told_of_the_first(
    run_server: Callable[..., ServerRun], tmp_path: Path
) -> None:
    first = run_server(tmp_path / "state").wait_ready()
    on_others, on_the_same = run_server(tmp_path / "state"), run_server(tmp_path / "state", ())
    for second in (on_others, on_the_same):
        assert f"process {first.process.pid} already runs as server" in error_line(second)
    assert first.call("GET", "/v2/health/live").status == 200
    assert first.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    "options", [("--http", "0.0.0.0:0"), ("--mqtt", "embedded:0.0.0.0:0"), ("--mqtt", "http://h")]
)
def test_settings_that_cannot_work_are_one_line(
    run_server: Callable[..., ServerRun], tmp_path: Path, options: tuple[str, ...]
) -> None:
    line = error_line(run_server(tmp_path / "state", (*FREE, *options)))
    assert "without encryption" in line or "expected mqtt://" in line


def test_a_broker_that_is_away_is_one_line(
    run_server: Callable[..., ServerRun], tmp_path: Path, free_port: int
) -> None:
    url = f"mqtt://127.0.0.1:{free_port}"
    server = run_server(tmp_path / "state", ("--http", "127.0.0.1:0", "--mqtt", url))
    server.process.wait(30)
    assert f"no broker at {url}" in server.stderr.splitlines()[-1]
    assert server.process.returncode == 1
    assert "Traceback" not in server.stderr


def test_a_broker_that_crashes_is_started_again(
    run_server: Callable[..., ServerRun], exported: Exported, tmp_path: Path
) -> None:
    server = run_server(tmp_path / "state").wait_ready()
    broker = server.family[1]
    broker.kill()

    def restarted() -> bool:
        family = server.family
        return len(family) == 2 and family[1].pid != broker.pid and is_listening(server.mqtt.port)

    wait_until(restarted, "the broker is not back", 15)
    assert server.call("GET", "/v2/health/live").status == 200


def test_sigterm_while_queries_run_ends_it_all_the_same(
    run_server: Callable[..., ServerRun], exported: Exported, tmp_path: Path
) -> None:
    exported.install(tmp_path / "state" / "models")
    server = run_server(tmp_path / "state").wait_ready()
    body = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": [32, 1, 8, 8],
                    "datatype": "UINT8",
                    "data": exported.x[:32].ravel().tolist(),
                }
            ]
        }
    ).encode()
    statuses: list[int] = []

    def flood() -> None:
        while True:
            try:
                answer = server.call("POST", "/v2/models/digits/infer", body=body)
            except urllib3.exceptions.HTTPError:  # the server has gone
                return
            statuses.append(answer.status)

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: 200 in statuses, "no query is answered")
    family = server.family
    began = time.monotonic()
    assert server.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 6
    assert gone(family)
    for thread in threads:
        thread.join(15)
    assert set(statuses) <= {200, 429, 503}
    assert 200 in statuses
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
def test_sigterm_while_it_starts_stops_what_was_started(
    run_server: Callable[..., ServerRun], tmp_path: Path, wait_s: float
) -> None:
    state = tmp_path / "state"
    server = run_server(state)
    wait_until((state / "server.lock").exists, "it does not start")
    time.sleep(wait_s)
    family = server.family
    began = time.monotonic()
    assert server.end(signal.SIGTERM) == 0, server.stderr
    assert time.monotonic() - began < 10
    assert gone(family)
    assert "Traceback" not in server.stderr


def test_second_signal_ends_it_at_once(
    run_server: Callable[..., ServerRun], tmp_path: Path
) -> None:
    server = run_server(tmp_path / "state").wait_ready()
    family = server.family
    broker = family[1]
    broker.suspend()  # so that the orderly stop waits for it
    server.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert server.process.poll() is None
    assert server.end(signal.SIGTERM) == -signal.SIGTERM
    broker.resume()
    assert gone(family)


def test_stop_that_hangs_ends_at_the_deadline(tmp_path: Path) -> None:
    program = (
        "import time\nfrom server.stopping import Stopping\n"
        "stopping = Stopping(deadline_s=0.3)\nstopping.on_stop(lambda: None)\n"
        "print(flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"not everything has stopped within 0.3 s" in err


def _token(state: Path) -> str:
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "server", "token", "create"]
    done = subprocess.run(
        [*command, "--state", str(state)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_certificate_for_another_name_serves_devices_and_the_server_itself(
    run_server: Callable[..., ServerRun], tmp_path: Path
) -> None:
    """A certificate of an authority, for the name that devices use, in a file with its chain."""
    authority, leaf, key = _certificates(tmp_path, "edge")
    _, another, _ = _certificates(tmp_path, "another")
    tls = ("--tls-cert", str(leaf), "--tls-key", str(key))
    server = run_server(tmp_path / "state", (*FREE, *tls)).wait_ready()
    port = server.http.rsplit(":", 1)[1]
    live = urllib3.PoolManager(ca_certs=str(authority)).request(
        "GET", f"https://localhost:{port}/v2/health/live"
    )
    assert live.status == 200

    ends = "Not authorized", "unreachable", "certificate is not trusted"
    by_name, by_address = replace(server.mqtt, host="localhost"), server.mqtt
    for address, ca, pinned, reached in (
        (by_name, authority, None, True),
        (by_address, authority, None, False),
        (by_address, None, leaf, True),
        (by_address, None, another, False),
    ):
        link = MqttLink(
            address,
            client_id="pi-1",
            password="wrong",
            ca=None if ca is None else str(ca),
            pinned=None if pinned is None else str(pinned),
        )
        link.start()
        wait_until(lambda: any(end in link.last_error for end in ends), lambda: link.last_error)  # noqa: B023 - called within this turn
        link.stop()
        # a broker that it trusts gets the wrong password, and refuses it
        assert ("Not authorized" in link.last_error) is reached, link.last_error


def _certificates(folder: Path, common_name: str) -> tuple[Path, Path, Path]:
    """An authority, a certificate for localhost that it issued (with its chain), and the key."""
    now = dt.datetime.now(dt.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
    certificates = []
    for name, key, is_authority in (("authority", keys[0], True), (common_name, keys[1], False)):
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        )
        signed = builder.sign(keys[0], hashes.SHA256())
        certificates.append(signed.public_bytes(serialization.Encoding.PEM))
    ends = "authority.pem", "leaf.pem", "key.pem"
    paths = tuple(folder / f"{common_name}-{end}" for end in ends)
    paths[0].write_bytes(certificates[0])
    paths[1].write_bytes(certificates[1] + certificates[0])
    paths[2].write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths[0], paths[1], paths[2]


def test_no_secret_is_in_the_log_of_a_server(
    run_server: Callable[..., ServerRun], tmp_path: Path
) -> None:
    """FAULTS row 34: at the most talkative level, for requests that succeed and that fail."""
    state = tmp_path / "state"
    server = run_server(state, (*FREE, "--debug")).wait_ready()
    token = _token(state).split(".")[0]
    operator = load_operator_secret(state)
    body = {"token": token, "name": "pi-1", "profile": load_reference("raspberry-pi-4").to_dict()}
    credential = server.call("POST", "/api/v1/enroll", json=body).json()["credential"]
    guessed = "canary-of-a-guess-0123456789-0123456789"
    server.call("POST", "/api/v1/enroll", json={**body, "token": guessed})
    for login in (f"pi-1:{credential}", f"pi-1:{guessed}", f"operator:{operator}", f"{guessed}"):
        headers = {"Authorization": f"Bearer {login}"}
        for path in ("/api/v1/devices/pi-1", "/tuf/targets/" + "x" * 5_000, "/api/v1/audit"):
            server.call("GET", path, headers=headers)
        server.call("GET", "/v2", headers={**headers, "Host": "attacker.example"})
        server.call("PUT", "/api/v1/devices/pi-1/profile", headers=headers, body=b"[" * 5_000)
        port = int(server.http.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
            peer.sendall(f"GET /v2 HTTP/9\r\nAuthorization: Bearer {login}\r\n\r\n".encode())
            assert b"400" in peer.recv(1_000)
    assert server.end(signal.SIGTERM) == 0
    log = server.stderr
    assert "DEBUG" in log
    for secret in (token, credential, operator, guessed):
        assert secret not in log
