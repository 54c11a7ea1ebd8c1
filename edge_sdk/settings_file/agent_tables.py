"""Tables of agent.toml that are settings of `EdgeAgent`: [agent], [budget], [agreement], [power],
[learn] and [traces].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.records import read_record
from edge_sdk.settings import AgentSettings, Agreement, Budget, Learn, Power, Traces

CONTROLLERS: Final[Mapping[str, type[Budget | Agreement]]] = {
    "budget": Budget,
    "agreement": Agreement,
}
# keys of `AgentSettings` that are tables of their own
TABLES_OF: Final = {
    "controller": "[budget] or [agreement]",
    "power": "[power]",
    "traces": "[traces]",
}
TABLES: Final = ("agent", *CONTROLLERS, "power", "learn", "traces")

TEMPLATE: Final = """\
[agent]
# Seconds that a prediction may wait for the server.
#deadline_s = 1.0
# Measure of uncertainty: entropy, margin, vacuity-exp, vacuity, or several, each with its own
# threshold, such as "all(entropy:0.3, margin:0.2)" or "any(...)". A single one needs `threshold`
# too. By default: the bundle's.
#gate = "all(entropy:0.3, margin:0.2)"
# Answer on the device where the uncertainty is below this number. By default: the bundle's.
#threshold = 0.5
# Codec of the data that are sent to the server: fp32, fp16 or int8. By default: the bundle's.
#codec = "fp16"
# false: answer every input on the device.
#offload = true
# true: keep queries that got no answer, and ask the server again later.
#late_answers = false
# Compute threads of one prediction.
#threads = 1
# What runs the graphs: auto (the fastest that gives the right answers on this device), cpu, cuda,
# openvino, xnnpack or tensorrt, as far as this onnxruntime has it (docs/providers.md).
#provider = "auto"
# Seconds between two attempts to reach a server that is away.
#probe_interval_s = 0.5
# Seconds between two reports to the server.
#heartbeat_s = 30.0
# Most queries of one stream that wait for the server at the same time.
#max_in_flight = 32
# Name of a training; the weights that this device kept from it answer in place of the bundle's.
#personal = "first"
# Share by which free memory, latency or the link must change to be reported to the server, which
# then chooses the bundle again; 0 reports nothing.
#report_change = 0.25
# Seconds that such a change must last.
#report_after_s = 60.0

# [budget] sets the threshold while the agent runs, so that offloads stay under a limit.
# Use [budget], [agreement] or `threshold`, only one of them.
[budget]
# Share of the predictions that may ask the server, from 0 to 1.
#limit = 0.2
# Cost of one offload, in the unit of the limit: 1 counts offloads, else bytes or joules.
#cost = 1.0
# The limit holds per "prediction" or per "second".
#per = "prediction"
# An uncertainty below this number is never sent, even within the limit.
#floor = -inf

# [agreement] sets the threshold so that the device's answers agree with the server's.
[agreement]
# Share of the device's answers for which the server may give another label, from 0 to 1.
#delta = 0.05
# Confidence of that bound, from 0 to 1.
#confidence = 0.95
# Share of the predictions that are compared with the server in the background.
#audit_share = 0.02

# [power] prices every answer in joules, once one of its keys is set: by sensors of the board where
# it has some, else by the watts that are declared here.
[power]
# false: use no sensors, only declared watts.
#sensors = true
# Board with known watts: raspberry-pi-3b-plus or raspberry-pi-4.
#board = "raspberry-pi-4"
# Or watts of this device at rest and with all cores busy.
#idle_w = 2.7
#busy_w = 6.4
# Joules for each megabyte that is sent or received.
#radio_j_per_mb = 0.0

# [learn] improves the bundle's exit head on this device (docs/learning.md). It takes corrections of
# answers, or the server's answers, or both. The samples that it learns from stay on the device.
[learn]
# Labels to learn from: "corrections", "server" or "both". By default nothing is learnt.
#labels = "both"
# The newest labelled samples that it learns from.
#samples = 512
# Learning rate, as a share of the largest that is safe.
#rate = 1.0
# Strength of the pull to the bundle's own exit head.
#pull = 0.001

# [traces] sends traces of predictions to a collector of OpenTelemetry (docs/traces.md).
[traces]
# URL of the collector for OTLP over HTTP, or "env" for the variable OTEL_EXPORTER_OTLP_ENDPOINT.
# By default nothing is traced.
#url = "http://collector:4318"
# Share of the predictions that are traced, from 0 to 1.
#share = 0.01
"""


def read_agent(tables: Mapping[str, object]) -> AgentSettings:
    """The settings in the tables of this module; absent ones are the defaults.

    An empty table [budget], [agreement], [power], [learn] or [traces] asks for nothing.

    Raises: ConfigurationError naming the table and the key.
    """
    asked = [name for name in CONTROLLERS if tables.get(name)]
    if len(asked) > 1:
        raise ConfigurationError("[budget] and [agreement]: expected one of them, got both")
    plain = tables.get("agent", {})
    for key, tables_of in TABLES_OF.items():
        if isinstance(plain, Mapping) and key in plain:
            raise ConfigurationError(f"[agent]: unknown {key}; use the table {tables_of}")
    settings = read_record(AgentSettings, plain, "[agent]")
    for name in asked:
        controller: Any = read_record(CONTROLLERS[name], tables[name], f"[{name}]")
        settings = replace(settings, controller=controller)
    if tables.get("power"):
        settings = replace(settings, power=read_record(Power, tables["power"], "[power]"))
    if tables.get("learn"):
        settings = replace(settings, learn=read_record(Learn, tables["learn"], "[learn]"))
    if tables.get("traces"):
        settings = replace(settings, traces=read_record(Traces, tables["traces"], "[traces]"))
    return settings
