"""docs/brokers.md, typed: a Mosquitto of the user's own, and a server with it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import urllib3

from server.run import Addresses
from tests.reader import Document, Reader, environment, free_ports
from tests.waiting import wait_until

BROKERS = Document("docs/brokers.md")
WRITTEN_PORT = "18830"

pytestmark = pytest.mark.broker


@pytest.mark.deadline
def test_the_server_runs_with_a_mosquitto_of_the_readers_own(tmp_path: Path) -> None:
    http, mqtt = (str(port) for port in free_ports(2))
    printed = Reader(tmp_path).shell(BROKERS.snippet("config").replace(WRITTEN_PORT, mqtt))
    commands = BROKERS.snippet("run").replace(WRITTEN_PORT, mqtt)
    for line in printed.splitlines():  # the document types what is printed
        words = line.replace(f"{tmp_path}/", "").split()
        assert set(words) <= set(commands.replace("\\\n", "").split())
    (tmp_path / "server").mkdir()
    Addresses(f"127.0.0.1:{http}", f"embedded:127.0.0.1:{mqtt}").save(tmp_path / "server")
    log = (tmp_path / "log").open("w")
    shell = subprocess.Popen(
        ["bash", "-euc", f"{commands} wait"],
        cwd=tmp_path,
        env=environment(),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        wait_until(lambda: _is_live(http), (tmp_path / "log").read_text, 60)
        assert f"mqtt://127.0.0.1:{mqtt} (broker)" in (tmp_path / "log").read_text()
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(30)
        log.close()


def _is_live(port: str) -> bool:
    try:
        url = f"http://127.0.0.1:{port}/v2/health/live"
        return urllib3.request("GET", url, retries=False).status == 200
    except urllib3.exceptions.HTTPError:
        return False
