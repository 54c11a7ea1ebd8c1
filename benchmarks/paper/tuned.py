"""Numbers that the sweep chose for each method on held-out samples (benchmarks.tuning)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import orjson

from benchmarks.reports import RESULTS


@cache
def tuned_numbers(sweep: str) -> Mapping[str, Mapping[str, Any]]:
    """Changes to a recipe by method, as the committed report of the sweep has them.

    The recipe of the default is found under `default`. A sweep with trials left has no numbers, so
    that no table compares a method that was swept with one that was not.

    Args:
        sweep: its world (benchmarks.tuning.sweep). One that was not swept has no numbers.
    """
    try:
        report = orjson.loads((RESULTS / f"tuning-{sweep}.json").read_bytes())
    except FileNotFoundError:
        return {}
    chosen: Mapping[str, Mapping[str, Any]] = report["chosen"] if report.get("complete") else {}
    return chosen
