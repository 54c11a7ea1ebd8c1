"""What docs/discovery.md says to type, typed, and what strangers on the network announce.

Multicast on loopback is real here. Each test has a type of service of its own, so that servers of
other tests on this machine are not found.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from edge_sdk.discovery.network import Announcement, announced, find_servers
from edge_sdk.discovery.record import ServerRecord
from edge_sdk.identity import Identity
from server.discovery.announcement import server_record
from tests.edge.authority import Authority, make_authority
from tests.reader import Document, environment
from tests.serving.conftest import ServerRun
from tests.waiting import wait_until

pytestmark = pytest.mark.deadline

PAGE = Document("docs/discovery.md")
LOOPBACK = ["127.0.0.1"]
HERE = ("127.0.0.1",)
PATIENT_S = 60.0


@pytest.fixture
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A type of service of this test's own, also for the commands that it starts."""
    kind = f"_se{os.getpid() % 10**7}{abs(hash(request.node.name)) % 10**5}._tcp.local."
    monkeypatch.setenv("SPLITEDGE_SERVICE_TYPE", kind)
    return kind


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_authority(tmp_path / "authority", datetime.now(UTC) - timedelta(days=1))


def enrol(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    script = PAGE.snippet("enrol").replace("--ca hub-ca.pem", words)
    script = script.replace("--state", "--profile raspberry-pi-4 --no-bundle --state")
    return subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_device_finds_its_server_and_trusts_its_authority_alone(
    service: str, authority: Authority, tmp_path: Path
) -> None:
    command = PAGE.snippet("announce").strip().removesuffix("&").replace("\\\n", "")
    options = command.removeprefix("splitedge server run ").split()
    told = {
        "0.0.0.0:8000": "127.0.0.1:0",
        "auto:0.0.0.0:8883": "embedded:127.0.0.1:0",
        "hub.pem": str(authority.chain),
        "hub.key": str(authority.chain),
    }
    options = [told.get(word, word) for word in options[: options.index("--state")]]
    run = ServerRun(tmp_path / "server", options, tmp_path / "log").wait_ready()
    try:
        (found,) = wait_until(
            lambda: find_servers(service, wait_s=PATIENT_S), lambda: run.stderr, PATIENT_S
        )
        port = int(run.http.rpartition(":")[2])
        assert found == server_record(port, LOOPBACK, authority.chain)
        assert (found.hosts, found.tls) == (("127.0.0.1",), True)
        assert "so only this machine finds the server" in " ".join(run.stderr.split())

        token = tmp_path / "token.txt"
        token.write_text("not.read")
        # an authority of somebody else, and none
        other = make_authority(tmp_path / "other", datetime.now(UTC) - timedelta(days=1))
        refused = enrol(tmp_path, f"--ca {other.ca}")
        assert refused.returncode == 1, refused.stderr
        assert "certificate" in refused.stderr
        refused = enrol(tmp_path, "")
        assert (refused.returncode, "give --ca FILE" in refused.stderr) == (1, True)

        made = subprocess.run(
            ["splitedge", "server", "token", "create", "--state", "server"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        token.write_text(made.stdout)
        done = enrol(tmp_path, f"--ca {authority.ca}")
        assert done.returncode == 0, done.stderr
        assert f"found the server {found.name!r} at https://127.0.0.1:{port}" in done.stderr
        assert Identity.load(tmp_path / "device").server == f"https://127.0.0.1:{port}"
    finally:
        assert run.end() == 0, run.stderr


class Rogue:
    """A stranger's server: it keeps what it is asked."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        heard: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                heard.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                self.send_error(500)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.heard = heard
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port: int = self.server.server_address[1]


@contextmanager
def rogue(tls: ssl.SSLContext | None) -> Iterator[Rogue]:
    made = Rogue(tls)
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


@pytest.mark.parametrize("encrypted", [True, False], ids=["https", "http"])
def test_a_stranger_who_announces_himself_gets_no_token(
    service: str, authority: Authority, tmp_path: Path, encrypted: bool
) -> None:
    """FAULTS row 25."""
    (tmp_path / "token.txt").write_text("5ecret")
    his = make_authority(tmp_path / "his", datetime.now(UTC) - timedelta(days=1))
    with rogue(his.context if encrypted else None) as stranger:
        # he says that he has the certificate of the real server
        claimed = server_record(stranger.port, LOOPBACK, authority.chain).certificate
        record = ServerRecord(
            "hub", ("127.0.0.1",), stranger.port, tls=encrypted, certificate=claimed
        )
        with announced(lambda: Announcement(record, HERE), service):
            assert find_servers(service, wait_s=PATIENT_S) == [record]
            refused = enrol(tmp_path, f"--ca {authority.ca} --insecure")
        assert refused.returncode == 1, refused.stderr
        assert ("certificate" if encrypted else "without encryption") in refused.stderr
        assert stranger.heard == []
    assert not (tmp_path / "device" / "identity.json").exists()


def test_several_servers_are_listed(service: str, authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "token.txt").write_text("5ecret")
    one, two = (ServerRecord(name, ("127.0.0.1",), 9, tls=True) for name in ("attic", "cellar"))
    with (
        announced(lambda: Announcement(one, HERE), service),
        announced(lambda: Announcement(two, HERE), service),
    ):
        wait_until(lambda: len(find_servers(service)) == 2, "two servers", PATIENT_S)
        refused = enrol(tmp_path, f"--ca {authority.ca}")
    assert refused.returncode == 1
    text = " ".join(refused.stderr.split())
    assert "'attic' at https://127.0.0.1:9, 'cellar' at https://127.0.0.1:9; give" in text
