"""Options of `splitedge agent run` and `predict` come before `agent.toml`."""

from __future__ import annotations

from typing import Any

import pytest

from edge_sdk import AgentSettings, Agreement, Budget
from edge_sdk.cli.agent_options import AgentOptions
from edge_sdk.errors import ConfigurationError
from edge_sdk.settings import Learn, Traces

COLLECTOR = "http://collector:4318"
FILE = AgentSettings(deadline_s=3, codec="int8", late_answers=True)


@pytest.mark.parametrize(
    ("file", "options", "expected"),
    [
        (FILE, {}, FILE),
        (FILE, {"deadline_s": 5.0}, AgentSettings(deadline_s=5, codec="int8", late_answers=True)),
        (FILE, {"late_answers": False}, AgentSettings(deadline_s=3, codec="int8")),
        (FILE, {"local": True}, AgentSettings(deadline_s=3, codec="int8", offload=False)),
        # an option for the threshold replaces every other way of the file to set it
        (AgentSettings(threshold=1), {"limit": 0.2}, AgentSettings(controller=Budget(0.2))),
        (AgentSettings(threshold=1), {"delta": 0.2}, AgentSettings(controller=Agreement(0.2))),
        (AgentSettings(controller=Budget(1)), {"threshold": 2.0}, AgentSettings(threshold=2)),
        (AgentSettings(controller=Budget(1)), {"local": True}, AgentSettings(offload=False)),
        # what the file says about a server is of no use without one, and no fault
        (AgentSettings(learn=Learn("server")), {"local": True}, AgentSettings(offload=False)),
        (
            AgentSettings(gate="margin", controller=Budget(1)),
            {"local": True},
            AgentSettings(offload=False),
        ),
        # the controller's other numbers stay those of the file
        (
            AgentSettings(controller=Budget(1, cost=2.5)),
            {"limit": 3.0},
            AgentSettings(controller=Budget(3, cost=2.5)),
        ),
        (
            AgentSettings(controller=Agreement(0.1, audit_share=0.5)),
            {"delta": 0.2},
            AgentSettings(controller=Agreement(0.2, audit_share=0.5)),
        ),
        (AgentSettings(), {"traces": "env"}, AgentSettings(traces=Traces("env", 0.01))),
        (
            AgentSettings(traces=Traces("env", 0.5)),
            {"traces": COLLECTOR},
            AgentSettings(traces=Traces(COLLECTOR, 0.5)),
        ),
        (
            AgentSettings(traces=Traces(COLLECTOR, 0.5)),
            {"traces_share": 0.0},
            AgentSettings(traces=Traces(COLLECTOR, 0)),
        ),
    ],
)
def test_options_replace_what_the_file_says(
    file: AgentSettings, options: dict[str, Any], expected: AgentSettings
) -> None:
    assert AgentOptions(**options).settings(file) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.0, "limit": 0.1}, "expected one of --threshold, --budget, got 2"),
        ({"local": True, "limit": 0.1}, "controller needs offload"),
        ({"threads": 0}, "threads: expected a whole number from 1"),
        ({"codec": "zip"}, "codec: expected one of fp32, fp16, int8"),
        ({"delta": 1.0}, "delta: expected"),
        ({"traces_share": 0.5}, "--traces-share needs --traces URL"),
        ({"traces": COLLECTOR, "traces_share": 1.5}, "traces: share: expected"),
        ({"traces": "collector:4318"}, "traces: url: expected http://HOST:4318"),
        ({"traces": "http://"}, "traces: url: expected"),
        ({"traces": "http://[:4318"}, "traces: url: expected"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AgentOptions(**options).settings(AgentSettings())
