"""Messages to the service manager, and the watchdog that stops with the work."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edge_sdk import EdgeAgent, Prediction
from edge_sdk.errors import SplitedgeError
from edge_sdk.pipeline.sources.kinds import Surroundings, open_source
from edge_sdk.pipeline.stream import Stream
from edge_sdk.service.client import RunningAgent
from edge_sdk.service.service import AgentService
from edge_sdk.settings import AgentSettings
from edge_sdk.settings_file.serve_table import ServeTable
from edge_sdk.systemd.notify import Notifier
from edge_sdk.systemd.watchdog import Watchdog
from tests.edge.systemd.managers import Manager, listening_manager
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits

pytestmark = pytest.mark.deadline

WATCHDOG_S = 0.8


def test_the_manager_is_told_at_a_path_and_at_an_abstract_name(tmp_path: Path) -> None:
    for address in (str(tmp_path / "notify"), f"@splitedge-{os.getpid()}"):
        manager = Manager(address)
        environment = {"HOME": "/", **manager.environment(60)}
        notifier = Notifier.take(environment)
        assert environment == {"HOME": "/"}  # a child process must not speak for this one
        assert notifier.watchdog_s == 60
        notifier.ready("pi-4 runs\ndigits/1")
        notifier.alive()
        notifier.stopping()
        manager.read()
        assert manager.said == ["READY=1\nSTATUS=pi-4 runs digits/1", "WATCHDOG=1", "STOPPING=1"]
        manager.close()


def test_without_a_manager_or_with_another_ones_watchdog_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = Notifier.take({})
    nobody.ready("runs")
    assert nobody.watchdog_s == 0
    with listening_manager(tmp_path) as manager:
        child = Notifier.take({**manager.environment(60), "WATCHDOG_PID": "1"})
        assert child.watchdog_s == 0
    assert not caplog.records
    Notifier(str(tmp_path / "gone")).alive()  # the manager is being restarted: said, not raised
    assert "the service manager was not told" in caplog.text


@pytest.fixture
def bundle(digits: Digits) -> Path:
    return digits.models / "digits" / "1" / "bundles" / "d2"


def test_a_source_that_hangs_stops_the_watchdog_until_it_comes_back(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening a pipe without a writer hangs in the kernel, as reading a dead camera does."""
    pipe = tmp_path / "rows.csv"
    os.mkfifo(pipe)
    opened = open_source(f"csv:{pipe}", Surroundings(tmp_path))
    with (
        listening_manager(tmp_path) as manager,
        EdgeAgent.from_bundle(bundle, AgentSettings(offload=False, deadline_s=0.1)) as agent,
        Stream(agent, opened, []) as stream,
        Watchdog(Notifier.take(manager.environment(WATCHDOG_S))) as watchdog,
    ):
        manager.wait("WATCHDOG=1")
        watchdog.add(stream.hangs)
        why = manager.wait("STATUS=hangs")
        assert f"{pipe} has not come back for" in why
        assert manager.is_silent(2 * WATCHDOG_S)
        _let_go(pipe)
        manager.wait("WATCHDOG=1")
        stream._feed.stop()
        wait_until(lambda: _let_go(pipe) and not stream._reader.is_alive(), "it reads on")
    assert "the service manager restarts this process" in caplog.text


def _let_go(pipe: Path) -> bool:
    """End the wait of a thread that opens or reads the pipe; this open does not wait."""
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
    return True


@pytest.mark.parametrize("word", ["folder:.", "csv:missing.csv", "waiting:inputs"])
def test_a_source_that_waits_or_is_away_does_not_hang(
    bundle: Path, tmp_path: Path, word: str
) -> None:
    (tmp_path / "waiting.py").write_text(
        "import time\n\ndef inputs():\n    time.sleep(1.5)\n    yield from ()\n"
    )
    opened = open_source(word, Surroundings(tmp_path))
    settings = AgentSettings(offload=False, deadline_s=0.1)
    with EdgeAgent.from_bundle(bundle, settings) as agent, Stream(agent, opened, []) as stream:
        time.sleep(1.0)  # that nothing is found shows in no other way
        assert stream.hangs(0.6) == ""


def test_an_agent_that_answers_no_program_hangs(bundle: Path, tmp_path: Path) -> None:
    with EdgeAgent.from_bundle(bundle) as agent, AgentService(tmp_path, ServeTable()) as service:
        assert service.hangs(5.0) == ""  # it has not begun
        with service.answering(agent):
            assert service.hangs(5.0) == ""
            with agent._answering._counting:  # the status waits for this lock
                assert "get no answer" in service.hangs(0.3)
            assert service.hangs(5.0) == ""
        assert service.hangs(5.0) == ""


class SlowAgent(EdgeAgent):
    """An agent whose inferences and updates take as long as a test says."""

    entered: threading.Semaphore
    leave: threading.Event

    def predict(self, x: Any, **options: Any) -> Prediction:
        self.entered.release()
        assert self.leave.wait(60)
        return super().predict(x, **options)

    def refresh(self) -> str:
        self.entered.release()
        assert self.leave.wait(60)
        return self.manifest.bundle


def test_long_requests_of_programs_are_no_hang(
    bundle: Path, tmp_path: Path, digits: Digits
) -> None:
    """The watchdog asks over the same socket: it would end an agent in the middle of its work."""
    table = ServeTable()
    agent = SlowAgent.from_bundle(bundle)
    assert isinstance(agent, SlowAgent)
    agent.entered, agent.leave = threading.Semaphore(0), threading.Event()
    with (
        agent,
        AgentService(tmp_path, table) as service,
        service.answering(agent),
        ThreadPoolExecutor(table.in_flight + 1) as programs,
    ):
        running = RunningAgent.find(tmp_path)
        assert running is not None
        try:
            updates = programs.submit(running.refresh)
            rows = [
                programs.submit(lambda: list(running.predict(digits.x[:1], {})))
                for _ in range(table.in_flight)
            ]
            for _ in range(table.in_flight + 1):
                assert agent.entered.acquire(timeout=30)
            assert service.hangs(5.0) == ""
            with pytest.raises(SplitedgeError, match="the bundle is being updated already"):
                running.refresh()
        finally:
            agent.leave.set()
        assert updates.result(30)["bundle"] == agent.manifest.bundle
        assert all(len(row.result(30)) == 1 for row in rows)
