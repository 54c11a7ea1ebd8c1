"""Plans for tests, from numbers in one flat table as JSON has them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training

_TRAINING = frozenset(field.name for field in fields(Training))


def flat_plan(**numbers: Any) -> Plan:
    """A plan; the numbers of its training may stand among its own."""
    training = {name: numbers.pop(name) for name in _TRAINING & numbers.keys()}
    return Plan(training=Training(**training), **numbers)
