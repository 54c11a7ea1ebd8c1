"""Rounds as the report has them: one row each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from server.training.rounds.round import RoundResult
from server.training.run.run import Row


def row_of(
    result: RoundResult,
    accuracy: float | None,
    path: str,
    failures: Mapping[str, str] | None = None,
) -> Row:
    """A round as the report has it.

    Args:
        path: what its accuracy is of.
        failures: why clients sent no reply, as far as that is known.
    """
    known = failures or {}
    return {
        "round": result.round,
        "accuracy": accuracy,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "seconds": result.seconds,
        "processor_s": result.processor_s,
        "participants": list(result.participants),
        "missing": list(result.missing),
        "missing_why": {name: known[name] for name in result.missing if name in known},
        "loss": result.loss,
        "path": path,
        "supervised": is_supervised(result),
        "merged": result.merged,
        "refused": dict(result.refused),
        # the kinds of these reasons (server.training.rounds.reply_checks.Fault), by client
        "faults": {name: fault.value for name, fault in result.faults.items()},
        "missed_steps": dict(result.missed_steps),
        "bytes_by_kind": dict(result.bytes_by_kind),
        "suspects": dict(result.suspects),
        "stale": dict(result.stale),
        "simulated_s": result.simulated_s,
        "update_coding": dict(result.coding),
        "samples": dict(result.samples),
        # values of features beyond half precision's range, by client
        "clipped": dict(result.clipped),
        # clients whose update the method's own rule gave no weight
        "zeroed": [name for name, weight in result.weights.items() if weight == 0],
    }


def is_supervised(result: RoundResult) -> bool:
    """Whether the server answered any client's features."""
    return has_gradients(result.bytes_by_kind)


def has_gradients(bytes_by_kind: Mapping[str, int]) -> bool:
    """Whether a round's traffic so far has an answer of the server to features."""
    return "down gradients" in bytes_by_kind


def ever_supervised(rows: Iterable[Row]) -> bool:
    """Whether any of these rounds was supervised."""
    return any(row["supervised"] for row in rows)
