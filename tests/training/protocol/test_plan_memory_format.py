"""The memory format of a plan that leaves it open: one measurement for each network and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from edge_sdk.training.protocol import plan as plans
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.plan import Plan, with_format
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.update_codec import UpdateCoding

PLAN = Plan("cnn6", (1, 28, 28), 4, (0.0,), (1.0,), 2, Training(0.05, 6))

Change = Callable[[Plan], Plan]


def with_numbers(plan: Plan, **changed: Any) -> Plan:
    return replace(plan, training=replace(plan.training, **changed))


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the measurements will find, one after another; a real one could find either."""
    left = ["channels_last", "contiguous"]
    monkeypatch.setattr(plans, "chosen_format", lambda *_: left.pop())
    plans._format_here.cache_clear()  # a process keeps what it has found
    yield left
    plans._format_here.cache_clear()


def format_of(plan: Plan) -> str:
    return with_format(plan, torch.device("cpu")).training.memory_format


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, part=ClientPart(views=True)),
        lambda plan: replace(plan, part=ClientPart(exit_head=True, fusion="fixed")),
        lambda plan: with_numbers(plan, learning_rate=0.01, momentum=0.9, weight_decay=1e-4),
        lambda plan: with_numbers(plan, epochs=3, codec="int8"),
        lambda plan: replace(plan, update=UpdateCoding("top-k"), send_labels=False),
    ],
    ids=["views", "exit head", "optimiser", "amount and codec", "what is sent"],
)
def test_plans_of_one_network_get_one_format(change: Change, formats: list[str]) -> None:
    assert format_of(PLAN) == format_of(change(PLAN)) == "contiguous"
    assert formats == ["channels_last"]


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, depth=3),
        lambda plan: replace(plan, part=ClientPart(whole=True)),
        lambda plan: replace(plan, part=ClientPart(bottleneck=8)),
        lambda plan: with_numbers(plan, batch=7),
        lambda plan: with_numbers(plan, precision="bf16"),
        lambda plan: replace(plan, backbone="cnn8", depth=4),
    ],
    ids=["depth", "whole", "bottleneck", "batch", "precision", "network"],
)
def test_another_network_or_batch_is_measured(change: Change, formats: list[str]) -> None:
    assert format_of(PLAN) == "contiguous"
    assert format_of(change(PLAN)) == "channels_last"
    assert not formats
