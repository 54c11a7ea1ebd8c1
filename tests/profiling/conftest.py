"""A small network whose costs can be added up by hand."""

from __future__ import annotations

import pytest

from profiles.cost import CostTable, StageCost


@pytest.fixture
def cost_table() -> CostTable:
    """Four stages, to be cut after 1, 2 or 3; measured on a machine of 10 GFLOP/s.

    Beyond the weights (4 bytes a parameter, 12 in training) each needs, per sample:
        stage      1     2     3     4   exit 1  exit 2  exit 3  head
        inference  5000  3000  2000  900  1100    700     500    300
        training   4000  2000  1000  600  50      40      30     20
    """

    def part(name: str, parameters: int, output: int, pair: int, kept: int, ms: float) -> StageCost:
        return StageCost(
            name=name,
            parameters=parameters,
            flops=1000 * parameters,
            activation_bytes=output,
            inference_peak_bytes=4 * parameters + pair,
            training_peak_bytes=12 * parameters + kept,
            latency_ms=ms,
        )

    return CostTable(
        stages=(
            part("stage 1", 100, 1000, 5000, 4000, 1.0),
            part("stage 2", 200, 600, 3000, 2000, 2.0),
            part("stage 3", 400, 400, 2000, 1000, 4.0),
            part("stage 4", 800, 200, 900, 600, 8.0),
        ),
        exits={
            3: part("exit 3", 30, 40, 500, 30, 0.125),
            1: part("exit 1", 50, 40, 1100, 50, 0.5),
            2: part("exit 2", 40, 40, 700, 40, 0.25),
        },
        head=part("head", 60, 40, 300, 20, 0.5),
        score_gflops=10.0,
    )
