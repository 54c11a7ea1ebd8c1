"""Cost of a run and of its answers, against figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from edge_sdk.errors import ConfigurationError
from profiles.energy import EnergyReading
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.report.cost import answer_latency, energy_report, training_cost
from server.training.report.device_scores import DeviceScore, fleet_energy
from server.training.report.metrics import Score
from server.training.simulation.build import build_simulation
from server.training.simulation.run import simulate


def recipe_of(method: str, depth: int = 2, **numbers: Any) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "method_numbers": numbers,
            "data": {"name": "digits", "clients": 2, "train_max": 200},
            "train": {
                "backbone": "tiny",
                "rounds": 2,
                "batch": 50,
                "learning_rate": 0.05,
                "depth": depth,
            },
        }
    )


def test_latency_is_harmonys_model_of_the_parameters_on_each_side() -> None:
    """`tiny` cut at 2: prefix 1,248, head 650, 16 channels, 34,282 - 1,248 behind (docs)."""
    simulation = build_simulation(recipe_of("splitgp"))
    first, second = simulation.plans
    found = answer_latency(simulation, {first: 100, second: 50}, {first: 1.0, second: 0.25})
    suffix = 34_282 - 1_248
    expected = 100 * (1_248 / 20 + 16 + suffix / 100)
    expected += 50 * ((1_248 + 650) / 20 + 0.25 * (16 + suffix / 100))
    assert found["modelled"] == pytest.approx(expected)
    assert found["samples"] == 150
    assert found["offload_rate"] == pytest.approx((100 + 12.5) / 150)
    assert answer_latency(simulation, {first: 0}, {first: 1.0})["offload_rate"] is None


def test_each_client_has_a_power_of_its_own() -> None:
    """P_C in turn, as the depths; Eq. 12 by hand for each client."""
    text = recipe_of("splitfed-v1").to_dict() | {"evaluate": {"powers": [5.0, 40]}}
    text["train"] |= {"depth": None, "depths": [1, 3]}
    text["data"]["clients"] = 3
    simulation = build_simulation(read_recipe(text))
    found = answer_latency(
        simulation, dict.fromkeys(simulation.plans, 10), dict.fromkeys(simulation.plans, 1.0)
    )
    # `tiny`: prefixes of 80 and 5,888 parameters, 8 and 32 channels (docs/methods/common.md)
    shallow = 10 * (80 / 5 + 8 + (34_282 - 80) / 100)
    deep = 10 * (5_888 / 40 + 32 + (34_282 - 5_888) / 100)
    each = list(found["each"].values())
    assert [one["power"] for one in each] == [5.0, 40, 5.0]
    expected = [shallow, deep, shallow]
    assert [one["modelled"] for one in each] == pytest.approx(expected)
    assert found["modelled"] == pytest.approx(sum(expected))


@pytest.mark.parametrize("powers", [[], [0.0], [1.0, -2.0], ["fast"], 20.0])
def test_powers_that_cannot_be_are_refused(powers: Any) -> None:
    text = recipe_of("splitfed-v1").to_dict() | {"evaluate": {"powers": powers}}
    with pytest.raises(ConfigurationError, match="powers"):
        read_recipe(text)


def test_a_recipe_without_powers_is_written_as_before() -> None:
    assert "powers" not in recipe_of("splitfed-v1").to_dict()["evaluate"]


def test_client_with_the_whole_network_asks_nobody() -> None:
    simulation = build_simulation(recipe_of("fedavg"))
    (first, _) = simulation.plans
    found = answer_latency(simulation, {first: 10}, {first: 1.0})
    assert found["modelled"] == pytest.approx(10 * 34_282 / 20)


def test_rounds_add_up() -> None:
    row = {"seconds": 1.5, "bytes_up": 3, "bytes_down": 4}
    rows = [
        row | {"bytes_by_kind": {"up weights": 3, "down weights": 4}},
        row | {"bytes_by_kind": {"up weights": 3, "down gradients": 4}},
    ]
    assert training_cost(rows) == {
        "seconds": 3.0,
        "bytes_up": 6,
        "bytes_down": 8,
        "bytes_by_kind": {"down gradients": 4, "down weights": 4, "up weights": 6},
    }


def test_fleets_energy_is_of_those_that_know_theirs() -> None:
    def score(name: str, joules: float | None, source: Any) -> DeviceScore:
        reading = EnergyReading(joules, 2.0, source, "")
        return DeviceScore(name, 2, Score(1, 2), None, reading)

    scores = [score("a", 5.0, "ina"), score("b", None, "none"), score("c", 2.5, "declared")]
    found = fleet_energy(scores)
    assert found["joules"] == 7.5
    assert found["sources"] == {"a": "ina", "b": "none", "c": "declared"}
    assert found["seconds"] == 6.0
    assert fleet_energy(scores[1:2])["joules"] is None


def test_power_for_a_point_and_co2_by_hand() -> None:
    """7.2 kJ in 2 minutes are 60 W and 0.002 kWh; 60 W for 80 % are 0.75 W a point."""
    reading = EnergyReading(7200.0, 120.0, "declared", "by hand")
    found = energy_report(reading, "all", 2, accuracy=0.8, co2_g_kwh=400.0)
    assert found["watts"] == pytest.approx(60)
    assert found["watts_per_point"] == pytest.approx(0.75)
    assert found["co2_g"] == pytest.approx(0.8)
    for accuracy in (None, 0.0):
        found = energy_report(reading, "all", 2, accuracy=accuracy)
        assert (found["watts_per_point"], found["co2_g"]) == (None, None)
    unknown = EnergyReading(None, 120.0, "none", "no source")
    found = energy_report(unknown, "all", 2, accuracy=0.8, co2_g_kwh=400.0)
    assert {found[key] for key in ("watts", "watts_per_point", "co2_g")} == {None}


def test_simulations_report_says_what_it_cost(tmp_path: Path) -> None:
    simulate(recipe_of("supersfl"), tmp_path)
    report = orjson.loads((tmp_path / "report.json").read_bytes())
    assert report["training"]["bytes_up"] == sum(row["bytes_up"] for row in report["rounds"])
    assert set(report["training"]["bytes_by_kind"]) == {
        "down gradients",
        "down weights",
        "up features",
        "up labels",
        "up weights",
    }
    assert report["latency"]["modelled"] > 0
    assert report["latency"]["offload_rate"] == 1.0
    energy = report["energy"]
    assert energy["source"] in {"rapl", "ina", "none"}
    assert (energy["joules"] is None) == (energy["source"] == "none")
    assert energy["detail"]
    assert (energy["of"], energy["rounds"]) == ("clients and server", 2)
    simulate(recipe_of("supersfl"), tmp_path, resume=True)
    again = orjson.loads((tmp_path / "report.json").read_bytes())
    assert again["energy"]["rounds"] == 0  # only those of this process can be told
