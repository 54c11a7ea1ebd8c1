"""Metrics of a running agent, from the content of its heartbeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from edge_sdk.answers.prediction import DEVICE, FALLBACK, SERVER
from edge_sdk.answers.tally import LATENCY_EDGES_MS, uncertainty_edges
from edge_sdk.installation import installed_version
from edge_sdk.metrics.text_format import Family, Sample, counter, exposition, histogram, single
from edge_sdk.offload.availability import Presence

_LATENCY_EDGES_S: Final = tuple(edge / 1e3 for edge in LATENCY_EDGES_MS)


def agent_metrics(telemetry: Mapping[str, Any]) -> bytes:
    """The metrics as text.

    Args:
        telemetry: what `EdgeAgent.telemetry` gives.
    """
    return exposition(_families(telemetry))


def _families(told: Mapping[str, Any]) -> Iterator[Family]:
    labels = {name: str(told[name]) for name in ("device", "bundle")}
    info = Sample(1, {**labels, "version": installed_version()})
    yield Family("splitedge_agent_info", "gauge", "Device, bundle and release.", [info])
    yield single("splitedge_agent_uptime_seconds", "gauge", "Age of this agent.", told["uptime_s"])
    counters = told["counters"]
    yield counter(
        "splitedge_agent_answers_total",
        "Answers by source.",
        {source: counters[source] for source in (DEVICE, SERVER, FALLBACK)},
        "source",
    )
    yield from _histograms(told["answers"])
    yield from _link(told, counters)
    yield from _controllers(told)
    if "traces" in told["reports"]:
        text = "Spans of traces, by outcome: sent, or dropped because no collector took them."
        spans = told["reports"]["traces"]
        yield counter("splitedge_agent_trace_spans_total", text, spans, "outcome")
    memory = told["memory"]
    yield single(
        "process_resident_memory_bytes", "gauge", "Memory of the agent.", memory["resident_bytes"]
    )
    yield single(
        "splitedge_agent_memory_available_bytes",
        "gauge",
        "Memory of the device that programs can have.",
        memory["available_bytes"],
    )


def _histograms(answers: Mapping[str, Any]) -> Iterator[Family]:
    """Histograms of the bundle that runs; they begin anew with the next one."""
    edges = uncertainty_edges(answers["largest"])[1:-1]
    samples = histogram(edges, answers["uncertainty"], answers["uncertainty_sum"], {})
    text = "Uncertainty of the exit head, in the unit of the gate (nats for entropy)."
    yield Family("splitedge_agent_uncertainty", "histogram", text, samples)
    samples = [
        sample
        for source, counts in answers["latency"].items()
        for sample in histogram(
            _LATENCY_EDGES_S, counts, answers["latency_ms"][source] / 1e3, {"source": source}
        )
    ]
    text = "Time from the call to the answer, by source."
    yield Family("splitedge_agent_answer_duration_seconds", "histogram", text, samples)


def _link(told: Mapping[str, Any], counters: Mapping[str, Any]) -> Iterator[Family]:
    present = told["presence"] == Presence.PRESENT.value
    yield single("splitedge_agent_server_up", "gauge", "1 if the server answers.", present)
    round_trip_ms = told["link"]["round_trip_ms"]
    yield single(
        "splitedge_agent_round_trip_seconds",
        "gauge",
        "Round trip of the last probe.",
        None if round_trip_ms is None else round_trip_ms / 1e3,
    )
    yield counter(
        "splitedge_agent_query_bytes_total",
        "Payloads of queries (up) and replies (down).",
        {"up": told["bytes_up"], "down": told["bytes_down"]},
        "direction",
    )
    for name, text in (
        ("late_replies", "Replies that came after the deadline, twice or unasked."),
        ("refused_replies", "Replies that were no valid frames."),
        ("late_lost", "Queries for which the outbox had no room."),
    ):
        yield single(f"splitedge_agent_{name}_total", "counter", text, counters[name])
    text = "Queries in the outbox without an answer."
    yield single("splitedge_agent_outbox_queries", "gauge", text, counters["late_waiting"])


def _controllers(told: Mapping[str, Any]) -> Iterator[Family]:
    yield single("splitedge_agent_threshold", "gauge", "Threshold of the gate.", told["threshold"])
    agreement, budget = told["agreement"], told["budget"]
    if agreement is not None:
        text = "Upper bound of the disagreement with the server among exits; none while none holds."
        yield single("splitedge_agent_disagreement_bound_ratio", "gauge", text, agreement["bound"])
        text = "Disagreement that the settings tolerate."
        yield single("splitedge_agent_disagreement_limit_ratio", "gauge", text, agreement["delta"])
    if budget is not None:
        for name, text in (
            ("spent", "Cost of the offloads, in the unit of the budget."),
            ("earned", "What the budget allowed so far, in its unit."),
        ):
            yield single(f"splitedge_agent_budget_{name}_total", "counter", text, budget[name])
    energy = told["energy"]
    if energy is not None and energy["source"] != "none":
        text = "Energy of all answers, above rest."
        yield single("splitedge_agent_energy_joules_total", "counter", text, energy["joules"])
