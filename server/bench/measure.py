"""Timing on a busy machine: candidates take turns, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a benchmark report.

    Attributes:
        value: in `unit`; for a ratio, ours over the reference. None if it was not measured.
        limit: goal of `value`; None for a figure without a goal.
        ok: whether the goal is met.
        reference_value: figure of the named reference in the same run, in its own unit.
    """

    name: str
    value: float | None
    unit: str
    limit: float | None
    ok: bool
    reference_value: float | None


def at_most(name: str, value: float, unit: str, limit: float, reference: float) -> Row:
    """A row with a goal: `value` is at most `limit`."""
    return Row(name, round(value, 4), unit, limit, value <= limit, round(reference, 4))


def at_least(name: str, value: float, unit: str, limit: float, reference: float) -> Row:
    """A row with a goal: `value` is at least `limit`."""
    return Row(name, round(value, 4), unit, limit, value >= limit, round(reference, 4))


def figure(name: str, value: float, unit: str, reference: float | None) -> Row:
    """A row without a goal."""
    rounded = None if reference is None else round(reference, 4)
    return Row(name, round(value, 4), unit, None, ok=True, reference_value=rounded)


def not_measured(name: str, unit: str, limit: float, reason: str) -> Row:
    """A row without a value: a goal that was not measured is not met."""
    return Row(f"{name}: not measured, {reason}", None, unit, limit, False, None)


def take_turns(
    candidates: Sequence[Callable[[], object]],
    *,
    rounds: int,
    calls: int,
    pause_s: float = 0.0,
) -> list[float]:
    """Median seconds of one call of each candidate.

    Every round runs each candidate `calls` times in a row; a round's figure is the median of its
    calls, and the result the median of the rounds, so that other work slows all of them alike.

    Args:
        pause_s: sleep before each call, not counted. A call once a millisecond finds colder caches
            than a call in a loop, and takes two to four times as long.
    """
    figures: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds):
        for candidate, kept in zip(candidates, figures, strict=True):
            kept.append(_median_call(candidate, calls, pause_s))
    return [statistics.median(kept) for kept in figures]


def _median_call(candidate: Callable[[], object], calls: int, pause_s: float) -> float:
    times = []
    for _ in range(calls):
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter()
        candidate()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
