"""A plan in words: amounts with three digits, and the cells of its tables."""

from __future__ import annotations

import math
from typing import Final

from server.planning.limits import Limit
from server.planning.plan import Line, Plan

_BYTES: Final = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES: Final = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"))


def amount(value: float, unit: str = "") -> str:
    """An amount as people read it: `1.23 GB a day`, `12,300`, `0.17 of a core`."""
    if unit.startswith("bytes"):
        size = next(((each, name) for each, name in _BYTES if value >= each), (1.0, "bytes"))
        return f"{_digits(value / size[0])} {size[1]}{unit.removeprefix('bytes')}"
    if unit == "s":
        size = next(((each, name) for each, name in _TIMES if value >= 2 * each), (1.0, "s"))
        return f"{_digits(value / size[0])} {size[1]}"
    if unit == "share":
        return f"{_digits(100 * value)} %"
    return f"{_digits(value)}{unit}" if unit.startswith("/") else f"{_digits(value)} {unit}".strip()


def _digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    if abs(value) < 1e-4:
        return "below 0.0001"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    shown = f"{round(value, digits):,.{digits}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def line_cells(line: Line) -> tuple[str, str, str, str, str]:
    """The cells of one amount: part, what, amount, reports, and whether it was measured."""
    where = "" if not line.reports else "yes"
    if line.extrapolated:
        where = f"extrapolated, {amount(line.beyond)} times as far"
    reports = ", ".join(line.reports) or "computed"
    return line.part, line.what, amount(line.value, line.unit), reports, where


def limit_cells(limit: Limit) -> tuple[str, str, str, str, str]:
    """The cells of one limit: what, its use, devices at which it is full, reports, advice."""
    full = "-" if math.isinf(limit.devices) else f"{amount(limit.devices)} devices"
    reports = ", ".join(limit.reports) or "a setting"
    return limit.what, f"{100 * limit.used:,.1f} %", full, reports, limit.instead


def summary(plan: Plan, cores: int, memory_gb: float) -> str:
    """One paragraph: machines, cores, memory, traffic, and money where there is a price."""
    servers = f"{plan.servers:,} server{_s(plan.servers)} with a broker and a database each"
    backends = f"{plan.backends:,} backend{_s(plan.backends)} of each"
    text = (
        f"{plan.fleet.devices:,} devices: {servers}, {backends}; {plan.cores:,} cores and"
        f" {amount(plan.memory_gb * 1e9, 'bytes')} of memory, which are {plan.machines:,}"
        f" machine{_s(plan.machines)} of {cores} cores and {memory_gb:g} GB;"
        f" {amount(plan.gb_per_day * 1e9, 'bytes')} a day over the network."
    )
    if plan.money_month is not None:
        text += f" At your prices {plan.money_month:,.2f} a month."
    return text


def _s(count: int) -> str:
    return "" if count == 1 else "s"
