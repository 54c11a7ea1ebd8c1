"""Metrics of a running agent, as Prometheus reads them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_sdk.metrics.agent_metrics import agent_metrics
from edge_sdk.metrics.text_format import Family, Sample, counter, exposition, histogram, single
from tests.edge.running.conftest import SAMPLES, Site
from tests.exposition import families_of, value_of


def test_a_running_agent_tells_what_it_did(site: Site) -> None:
    for x in SAMPLES:
        site.agent.predict(x)
    answer = site.call("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = families_of(answer.body.decode())
    counters = site.agent.status().counters
    assert value_of(found, "splitedge_agent_answers_total", source="device") == counters.device
    assert value_of(found, "splitedge_agent_uncertainty_count") == counters.total
    seconds = "splitedge_agent_answer_duration_seconds"
    assert value_of(found, f"{seconds}_count", source="device") == counters.device
    assert 0 < value_of(found, f"{seconds}_sum", source="device") < 0.1 * counters.device
    assert value_of(found, "splitedge_agent_threshold") == site.agent.status().threshold
    assert value_of(found, "process_resident_memory_bytes") > 10_000_000
    assert found["splitedge_agent_info"].samples[0].labels["bundle"] == "bench-tiny/1/d2"


def test_controllers_tell_their_bounds_and_what_they_spent(site: Site) -> None:
    told = site.agent.telemetry()
    told |= {
        "agreement": {"bound": 0.04, "delta": 0.05},
        "budget": {"spent": 3.0, "earned": 4.5},
        "energy": {"source": "rapl", "joules": 1.25},
        "threshold": -math.inf,
        "link": {"round_trip_ms": 2.5},
    }
    found = families_of(agent_metrics(told).decode())
    assert value_of(found, "splitedge_agent_disagreement_bound_ratio") == 0.04
    assert value_of(found, "splitedge_agent_disagreement_limit_ratio") == 0.05
    assert value_of(found, "splitedge_agent_budget_spent_total") == 3.0
    assert value_of(found, "splitedge_agent_energy_joules_total") == 1.25
    assert value_of(found, "splitedge_agent_round_trip_seconds") == 0.0025
    assert value_of(found, "splitedge_agent_threshold") == -math.inf


def test_any_text_and_any_number_survive_the_format() -> None:
    odd = 'a\\b"c\nd{}=,é'
    numbers = [0.1, 1e-9, 1e300, 2.0**60, -3.0, math.inf, -math.inf, 123456789.125]
    family = Family(
        "splitedge_odd",
        "gauge",
        odd,
        [Sample(one, {"x": odd + str(i)}) for i, one in enumerate(numbers)],
    )
    read = list(text_string_to_metric_families(exposition([family]).decode()))
    assert [sample.value for sample in read[0].samples] == numbers
    assert [sample.labels["x"] for sample in read[0].samples] == [odd + str(i) for i in range(8)]
    assert read[0].documentation == odd
    assert exposition([replace(family, samples=[Sample(math.nan)])]).endswith(
        b"splitedge_odd NaN\n"
    )


def test_a_histogram_has_running_sums_and_a_value_that_is_not_known_no_sample() -> None:
    samples = histogram([0.5, 1.0], [2, 0, 3], 7.5, {"source": "device"})
    text = exposition(
        [
            Family("splitedge_h_seconds", "histogram", "H.", samples),
            single("splitedge_g", "gauge", "G.", None),
            counter("splitedge_c_total", "C.", {"up": 1}, "way"),
        ]
    ).decode()
    found = families_of(text)
    assert set(found) == {"splitedge_h_seconds", "splitedge_c"}
    assert value_of(found, "splitedge_h_seconds_bucket", le="1") == 2
    assert value_of(found, "splitedge_h_seconds_count") == 5
    with pytest.raises(ValueError, match="zip"):
        histogram([0.5], [1], 1.0, {})
