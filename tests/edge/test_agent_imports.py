"""Modules in an agent's process: none that only a server, a trainer or an updater needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

HEAVY = (
    "torch fastapi sqlalchemy tuf cryptography typer rich onnx pydantic psutil asyncio h11"
    " opentelemetry"
)
# the device's monitor reads free memory by psutil, some seconds after the start
RUNNING = HEAVY.replace(" psutil", "")

IMPORT = f"""
import sys
import edge_sdk
assert edge_sdk.__version__
from edge_sdk import AgentSettings, Agreement, Budget, EdgeAgent, LateAnswer, Prediction
print([name for name in {HEAVY.split()} if name in sys.modules])
"""

RUN = f"""
import sys
from pathlib import Path
import numpy as np
from edge_sdk import AgentSettings, Agreement, EdgeAgent
from edge_sdk.service.client import RunningAgent
from edge_sdk.service.service import AgentService
from edge_sdk.settings_file.serve_table import ServeTable

state = Path(sys.argv[1])
x = np.load(sys.argv[2])
settings = AgentSettings(controller=Agreement(0.3), late_answers=True, deadline_s=5.0)
service = AgentService(state, ServeTable())
with service, EdgeAgent.open(state, settings) as agent, service.answering(agent):
    sources = {{agent.predict(one).source for one in x[:50]}}
    running = RunningAgent.find(state)
    sources |= {{row["source"] for row in running.predict(x[:5], {{"threshold": -1}})}}
    running.refresh()
    print(sorted(sources), agent.late_answers())
print([name for name in {RUNNING.split()} if name in sys.modules])
"""


def fresh(*arguments: str) -> list[str]:
    """The lines that a fresh interpreter prints."""
    command = [sys.executable, "-P", "-c", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_the_sdk_brings_nothing_heavy() -> None:
    assert fresh(IMPORT) == ["[]"]


def test_a_running_agent_brings_nothing_heavy(fleet: Fleet, digits: Digits, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", digits.x)
    # a message limit below every query: the HTTP path is loaded too
    state = fleet.device("lean", max_packet_bytes=200)
    lines = fresh(RUN, str(state), str(tmp_path / "x.npy"))
    assert lines == ["['server'] []", "[]"]
