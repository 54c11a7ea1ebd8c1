"""Rows: the answers of a stream as sinks write them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from edge_sdk.answers.prediction import Prediction
from edge_sdk.pipeline.smoothing import Smoothed
from edge_sdk.pipeline.words import printable

Row = dict[str, Any]


def row_of(name: str, at: float, answer: Prediction, smoothed: Smoothed | None) -> Row:
    """One answer as a row that JSON takes.

    Args:
        name: of the input. at: when it was read, seconds since 1970.
        smoothed: the stream's label after this answer; None without smoothing.
    """
    row = {
        "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
        "input": printable(name),
        "label": answer.label,
        "class_name": answer.class_name,
        "source": answer.source,
        "uncertainty": answer.uncertainty,
        "threshold": answer.threshold,
        "latency_ms": round(answer.latency_ms, 3),
        "id": answer.id,
        "reason": answer.reason,
        "bytes_up": answer.bytes_up,
        "bytes_down": answer.bytes_down,
        "joules": answer.joules,
    }
    if smoothed is not None:
        row["smoothed_label"] = smoothed.label
        row["smoothed_class_name"] = smoothed.class_name
    return row
