"""The figures on the first page of the documents, from the committed reports.

They stand between `<!-- figures -->` and `<!-- end of figures -->` of docs/index.md.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from benchmarks.reports import RESULTS, ROOT
from edge_sdk.durable import write_atomic

PAGE: Final = ROOT / "docs" / "index.md"
_PLACE: Final = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
_IN_FLIGHT: Final = 16
_PLAIN: Final = "FastAPI, uvloop, httptools"
_LIBRARIES: Final = "`import numpy, onnxruntime, paho.mqtt.client`"


def table(results: Path = RESULTS) -> str:
    """The table: what was measured, and what stands beside it."""

    def report(name: str) -> Any:
        return orjson.loads((results / f"{name}.json").read_bytes())

    faults = report("faults")
    rows = [
        _predict(report("device-path")),
        _offload(report("round-trips")),
        _requests(report("peers")),
        _memory(report("footprint")),
        _never_answered(faults),
        _fault(faults, "update-kill", "`kill -9` in the middle of an update"),
        _fault(faults, "broker-kill", "`kill -9` of the broker, queries that may be late"),
    ]
    head = ["| what | measured | beside it | report |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def rewrite(page: Path = PAGE) -> bool:
    """Write the table into the page. Returns: whether it has changed."""
    text = page.read_text()
    new = with_figures(text)
    if new != text:
        write_atomic(page, new.encode())
    return new != text


def with_figures(text: str) -> str:
    """The page's text with the table of today's reports.

    Raises: ValueError if the page has no place for it.
    """
    if not _PLACE.search(text):
        raise ValueError("expected a line <!-- figures --> and a line <!-- end of figures -->")
    made = table()
    return _PLACE.sub(lambda found: f"{found[1]}\n{made}\n{found[2]}", text)


def _predict(report: Any) -> Sequence[str]:
    ways = next(one["ways_us"] for one in report["calls"] if one["backbone"] == "cnn6")
    return (
        "an answer of the device itself (`cnn6`, depth 2)",
        f"{ways['predict']:.0f} us",
        f"{ways['run, all outputs']:.0f} us: the same graph in onnxruntime alone",
        _link("device-path"),
    )


def _offload(report: Any) -> Sequence[str]:
    case = next(one for one in report["cases"] if (one["broker"], one["qos"]) == ("Mosquitto", 0))
    return (
        "an answer of the server, over Mosquitto on one machine, without a network",
        f"{case['offload'] / 1e3:.2f} ms",
        f"{case['echo'] / 1e3:.2f} ms: the same bytes, sent back by a bare client",
        _link("round-trips"),
    )


def _requests(report: Any) -> Sequence[str]:
    def rate(server: str) -> str:
        rates = [
            float(one["rate"])
            for one in report["figures"]
            if (one["server"], one["in_flight"]) == (server, _IN_FLIGHT)
        ]
        return f"{statistics.median(rates):,.0f}"

    return (
        f"requests a second at the server, v2 over HTTP, {_IN_FLIGHT} in flight",
        rate("splitedge"),
        f"{rate(_PLAIN)}: FastAPI on uvloop, with the same graph; {rate('LitServe')}: LitServe",
        _link("peers"),
    )


def _memory(report: Any) -> Sequence[str]:
    def mib(name: str) -> str:
        return f"{report['cases'][name]['proportional_bytes'] / 2**20:.0f} MiB"

    return (
        "memory of an agent that waits, shared pages counted once",
        mib("agent"),
        f"{mib(_LIBRARIES)}: numpy, onnxruntime and an MQTT client, imported",
        _link("footprint"),
    )


def _never_answered(report: Any) -> Sequence[str]:
    name, what = "black-hole", "1,000 queries to a server that takes them and never answers"
    numbers = report["figures"][name]["numbers"]
    later_ms = 1e3 * (numbers["slowest_s"] - numbers["local_s"])
    text = (
        f"the first query was answered after {numbers['first_s']:.3f} s, at a deadline of 0.5 s;"
        f" all later ones took at most {later_ms:.1f} ms longer than an answer of the device itself"
    )
    return (*_fault(report, name, what)[:2], text, _link("faults"))


def _fault(report: Any, name: str, what: str) -> Sequence[str]:
    reached, _, more = report["figures"][name]["reached"].partition("; ")
    return what, reached, more, _link("faults")


def _link(name: str) -> str:
    return f"[{name}](../benchmarks/results/{name}.md)"
