"""Content of a heartbeat: an agent's status, and the measurements that a server keeps as history.

Counts go on from the agent's start, or from the load of its bundle, so a heartbeat that is lost
loses nothing: the server takes differences. `run` and `since` tell it when counts began anew.
"""

from __future__ import annotations

import re
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from edge_sdk.answers.status import Status
from edge_sdk.answers.tally import AnswerTally

PAGE_BYTES: Final = resource.getpagesize()


def heartbeat_content(
    status: Status,
    tally: AnswerTally,
    *,
    run: str,
    uptime_s: float,
    round_trip_ms: float | None,
) -> dict[str, Any]:
    """The fields of a status, and beside them, as JSON takes them:

    run, uptime_s     id of this run of the agent, and its age
    answers           since: id of these counts; largest, uncertainty, latency: histograms as
                      edge_sdk.answers.tally defines them; uncertainty_sum, latency_ms: sums
    link              round_trip_ms: of the last probe
    memory            resident_bytes: of the agent; available_bytes: of the device; or null
    """
    return {
        **asdict(status),
        "run": run,
        "uptime_s": round(uptime_s, 3),
        "answers": {
            "since": tally.id,
            "largest": tally.largest,
            "uncertainty": tally.uncertainty(),
            "uncertainty_sum": tally.uncertainty_sum,
            "latency": tally.latency(),
            "latency_ms": tally.latency_ms(),
        },
        "link": {"round_trip_ms": round_trip_ms},
        "memory": _memory(),
    }


def _memory() -> dict[str, int | None]:
    """Memory of this process and of the device, as Linux tells it; None elsewhere.

    psutil would tell the same, and would cost a running agent one more megabyte.
    """
    resident_pages = _number("/proc/self/statm", r"^\d+ (\d+)")
    available_kb = _number("/proc/meminfo", r"^MemAvailable: +(\d+) kB$")
    return {
        "resident_bytes": None if resident_pages is None else resident_pages * PAGE_BYTES,
        "available_bytes": None if available_kb is None else available_kb * 1024,
    }


def _number(file: str, pattern: str) -> int | None:
    try:
        found = re.search(pattern, Path(file).read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return None if found is None else int(found[1])
