"""What a prefix costs, added up by hand from the table in conftest.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from profiles.cost import CostTable
from profiles.errors import InvalidProfileError


def test_prefix_adds_up_parameters_operations_and_time(cost_table: CostTable) -> None:
    prefix = cost_table.prefix(2)
    assert prefix.parameters == 100 + 200 + 40
    assert prefix.flops == 340_000
    assert prefix.latency_ms == 1.0 + 2.0 + 0.25


def test_prefix_gives_out_the_smashed_data_not_the_logits(cost_table: CostTable) -> None:
    assert cost_table.prefix(2).activation_bytes == 600


def test_inference_holds_all_weights_and_the_widest_pair(cost_table: CostTable) -> None:
    assert cost_table.prefix(3).inference_peak_bytes == 4 * 730 + 5000
    assert cost_table.prefix(3, batch=2).inference_peak_bytes == 4 * 730 + 2 * 5000


def test_training_holds_three_copies_and_every_activation(cost_table: CostTable) -> None:
    assert cost_table.prefix(3).training_peak_bytes == 12 * 730 + 7030
    assert cost_table.prefix(3, batch=32).training_peak_bytes == 12 * 730 + 32 * 7030


def test_suffix_is_the_rest_with_the_final_head(cost_table: CostTable) -> None:
    suffix = cost_table.suffix(2)
    assert suffix.parameters == 400 + 800 + 60
    assert suffix.latency_ms == 12.5
    assert suffix.inference_peak_bytes == 4 * 1260 + 2000
    assert suffix.activation_bytes == 40
    assert cost_table.suffix(0).parameters == 1560
    assert cost_table.suffix(4).parameters == 60


def test_latency_scales_with_the_score(cost_table: CostTable) -> None:
    assert cost_table.latency_ms(2, 10.0) == 3.25
    assert cost_table.latency_ms(2, 2.5) == 13.0


def test_depths_are_those_with_an_exit_head(cost_table: CostTable) -> None:
    assert cost_table.depths == (1, 2, 3)


def test_table_survives_json(cost_table: CostTable) -> None:
    assert CostTable.from_dict(json.loads(json.dumps(cost_table.to_dict()))) == cost_table


@pytest.mark.parametrize("depth", [0, 4, -1])
def test_depth_without_exit_head_is_refused(cost_table: CostTable, depth: int) -> None:
    with pytest.raises(InvalidProfileError, match="expected one of 1, 2, 3, got"):
        cost_table.prefix(depth)


def test_impossible_arguments_are_refused(cost_table: CostTable) -> None:
    with pytest.raises(InvalidProfileError, match="batch"):
        cost_table.prefix(1, batch=0)
    with pytest.raises(InvalidProfileError, match="from 0 to 4, got 5"):
        cost_table.suffix(5)
    with pytest.raises(InvalidProfileError, match="score_gflops"):
        cost_table.latency_ms(1, 0.0)


def test_exit_after_the_last_stage_leaves_the_head_to_the_server(cost_table: CostTable) -> None:
    deeper = replace(cost_table, exits={**cost_table.exits, 4: cost_table.exits[3]})
    assert deeper.depths == (1, 2, 3, 4)
    assert deeper.suffix(4).parameters == cost_table.head.parameters


def test_exit_beyond_the_last_stage_is_refused(cost_table: CostTable) -> None:
    with pytest.raises(
        InvalidProfileError, match="exit depth: expected a whole number from 1 to 4, got 5"
    ):
        replace(cost_table, exits={**cost_table.exits, 5: cost_table.head})
    with pytest.raises(InvalidProfileError, match="at least one depth"):
        replace(cost_table, exits={})


def test_peak_below_the_weights_is_refused(cost_table: CostTable) -> None:
    with pytest.raises(
        InvalidProfileError, match=r"training_peak_bytes: .* at least 1200, got 1199"
    ):
        replace(cost_table.stages[0], training_peak_bytes=1199)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": "four"}, "stages: expected a list"),
        ({"stages": []}, "stages: expected at least 2, got 0"),
        ({"exits": []}, "exits: expected an object"),
        ({"head": {"name": "head"}}, "cost: fields: expected all of"),
        ({"score_gflops": "fast"}, "score_gflops: expected a finite number"),
        ({"scale": 1}, "none but"),
    ],
)
def test_malformed_table_is_refused_by_field(
    cost_table: CostTable, change: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidProfileError, match=message):
        CostTable.from_dict({**cost_table.to_dict(), **change})


@pytest.mark.parametrize("key", ["one", "-1", "", "²"])
def test_exits_are_keyed_by_depth(cost_table: CostTable, key: str) -> None:
    data = cost_table.to_dict()
    with pytest.raises(InvalidProfileError, match="exits: expected depths as keys"):
        CostTable.from_dict({**data, "exits": {key: data["head"]}})
