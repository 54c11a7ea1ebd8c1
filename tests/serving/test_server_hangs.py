"""What a service manager hears of a server: that it is ready, that it works, that it hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import urllib3
from fastapi import FastAPI

from edge_sdk.service.listening import listen
from edge_sdk.wire.address import Address
from server.backend.batcher import Batcher
from server.backend.jobs import Job
from server.backend.ladder import Entry
from server.http_server import HttpServer
from tests.edge.systemd.managers import listening_manager

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.serving.conftest import Exported, ServerRun

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

WATCHDOG_S = 1.0


def test_the_manager_hears_of_a_server_only_while_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_server: Callable[..., ServerRun]
) -> None:
    with listening_manager(tmp_path) as manager:
        for name, value in manager.environment(WATCHDOG_S).items():
            monkeypatch.setenv(name, value)
        server = run_server(tmp_path / "server").wait_ready()
        assert f"STATUS={server.http} (API)" in manager.wait("READY=1")
        printed = server.read_line()
        assert f"{server.http}/ (splitedge server dashboard-link" in printed
        assert "/sign-in/" not in printed, "others read the journal too"
        manager.wait("WATCHDOG=1")
        os.kill(server.process.pid, signal.SIGSTOP)
        assert manager.is_silent(2 * WATCHDOG_S)
        os.kill(server.process.pid, signal.SIGCONT)
        manager.wait("WATCHDOG=1")
        server.end()
        assert "STOPPING=1" in manager.read()


def test_a_loop_that_does_not_turn_hangs() -> None:
    app, held = FastAPI(), threading.Event()

    @app.get("/hold")
    async def hold() -> None:
        held.wait(20)  # a route that forgets that it shares its thread

    with HttpServer(app, listen(Address("127.0.0.1", 0))) as server:
        assert server.hangs(5.0) == ""
        asking = threading.Thread(
            target=urllib3.request, args=("GET", f"{server.url}/hold"), kwargs={"retries": False}
        )
        asking.start()
        deadline = time.monotonic() + 10
        while not server.hangs(0.2) and time.monotonic() < deadline:
            pass
        assert "has answered nothing" in server.hangs(0.2)
        held.set()
        asking.join(10)
        assert server.hangs(5.0) == ""


def test_a_batch_that_does_not_end_hangs(exported: Exported) -> None:
    held, begun = threading.Event(), threading.Event()

    class Stuck:
        """An engine whose graph never ends."""

        def run(self, _: Any) -> Any:
            begun.set()
            held.wait(20)
            raise RuntimeError("let go")

    batcher = Batcher()
    assert batcher.hangs(0.0) == ""
    done = threading.Event()
    entry = Entry(1, exported.x[:1])
    engine: Any = Stuck()
    batcher.submit(Job(engine=engine, entry=entry, deadline=None, done=lambda _: done.set()))
    assert begun.wait(10)
    time.sleep(0.2)  # the time that it has taken
    assert "a batch has not ended" in batcher.hangs(0.1)
    assert batcher.hangs(60.0) == ""
    held.set()
    assert done.wait(10)
    assert batcher.hangs(0.0) == ""
    batcher.stop()
    assert batcher.hangs(60.0) == ""
