"""Composed gates: their text, their one uncertainty, and the controllers that work on it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk import AgentSettings, Agreement, Budget, EdgeAgent
from edge_sdk.cli.agent_options import AgentOptions
from edge_sdk.errors import ConfigurationError, ManifestError
from edge_sdk.gate.gate import (
    POLICIES,
    Floats,
    Gate,
    answer_policy,
    entropy,
    gate_from,
    largest_uncertainty,
    margin,
    policy_of,
    uncertainties,
    vacuity,
)
from edge_sdk.gate.threshold_control import control_from
from edge_sdk.gate_form import GATE, GateForm, read_gate
from edge_sdk.manifest import GateSpec
from edge_sdk.settings_file.settings_file import SettingsFile
from server.training.recipe.recipe import read_recipe
from server.training.report.uncertainty import uncertainty_of
from tests.reader import Document

if TYPE_CHECKING:
    from tests.edge.digits import Digits

ALL = "all(entropy:0.3, margin:0.2)"
ANY = "any(entropy:0.3, margin:0.2)"
NESTED = "all(vacuity:0.5, any(entropy:0.3, margin:0.2):1.5)"


def random_logits(rows: int = 200, size: int = 10, scale: float = 3.0) -> Floats:
    return np.random.default_rng(size).normal(0, scale, (rows, size)).astype(np.float32)


def by_scipy(logits: Floats) -> dict[str, NDArray[np.float64]]:
    """The measures of rows, by scipy and numpy's sort."""
    p = scipy.special.softmax(logits.astype(np.float64), axis=1)
    ordered = np.sort(p, axis=1)
    alpha = np.log1p(np.exp(logits.astype(np.float64))) + 1
    return {
        "entropy": scipy.stats.entropy(p, axis=1),
        "margin": 1 - (ordered[:, -1] - ordered[:, -2]),
        "vacuity": logits.shape[1] / alpha.sum(axis=1),
        "vacuity-exp": logits.shape[1] / (np.exp(logits.astype(np.float64)) + 1).sum(axis=1),
    }


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("margin", GateForm("margin")),
        (" entropy ", GateForm("entropy")),
        (ALL, GateForm("all", None, (GateForm("entropy", 0.3), GateForm("margin", 0.2)))),
        ("any(margin,vacuity)", GateForm("any", None, (GateForm("margin"), GateForm("vacuity")))),
        (
            NESTED,
            GateForm(
                "all",
                None,
                (
                    GateForm("vacuity", 0.5),
                    GateForm("any", 1.5, (GateForm("entropy", 0.3), GateForm("margin", 0.2))),
                ),
            ),
        ),
    ],
)
def test_a_text_stands_for_one_form_and_back(text: str, form: GateForm) -> None:
    assert read_gate(text) == form
    assert read_gate(str(form)) == form
    assert GATE.accepts(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected entropy, margin, vacuity, vacuity-exp, or a comp.* got the end of the text"),
        ("luck", "expected entropy, margin, .* got luck"),
        ("Entropy", "expected entropy, margin, .* got Entropy"),
        ("entropy margin", "expected nothing more, got margin"),
        ("entropy:0.3", r"expected a scale within all\(...\) or any\(...\) only, got :"),
        ("all", r"expected '\(', got the end of the text"),
        ("all(entropy:0.3)", r"expected two or more measures in all\(...\), got entropy:0.3"),
        ("all(entropy:0.3, luck)", "expected entropy, margin, .* got luck"),
        ("all(entropy:0.3, margin:0.2", r"expected '\)', got the end of the text"),
        ("all(entropy:0.3 margin:0.2)", r"expected '\)', got margin"),
        ("any(entropy:0, margin)", "expected a number above 0 behind ':', got 0"),
        ("any(entropy:-1, margin)", "expected a number above 0 behind ':', got -1"),
        ("any(entropy:nan, margin)", "expected a number above 0 behind ':', got nan"),
        ("any(entropy:inf, margin)", "expected a number above 0 behind ':', got inf"),
        ("any(entropy:x, margin)", "expected a number above 0 behind ':', got x"),
        ("all(" * 60, "in at most 200 characters"),
    ],
)
def test_a_text_that_is_no_gate_is_refused_with_what_is_known(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_gate(text)
    assert not GATE.accepts(text)


@pytest.mark.parametrize("value", [None, 3, ["entropy"], {}, b"entropy"])
def test_a_value_that_is_no_text_is_no_gate(value: Any) -> None:
    assert not GATE.accepts(value)
    with pytest.raises(ManifestError, match="gate policy: expected entropy, margin"):
        GateSpec(value, 0.5)


@given(st.text(alphabet="alnyetropmgivcu():,0.5 ", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        form = read_gate(text)
    except ConfigurationError:
        return
    assert read_gate(str(form)) == form


def test_compositions_worked_out_by_hand() -> None:
    # softmax: three quarters and one quarter, so margin 1/2
    logits = np.array([math.log(3), 0], np.float32)
    h = 2 * math.log(2) - 0.75 * math.log(3)  # 0.5623 nats
    # margin 0.5 / 0.2 = 2.5 is above entropy h / 0.3 = 1.87
    assert policy_of(ALL, 2)(logits)[2] == pytest.approx(2.5, abs=1e-6)
    assert policy_of(ANY, 2)(logits)[2] == pytest.approx(h / 0.3, abs=1e-6)
    # without scales the largest values are taken: h / ln 2 = 0.811 and 0.5 / 1
    assert policy_of("all(entropy, margin)", 2)(logits)[2] == pytest.approx(h / math.log(2), 1e-6)
    assert policy_of("any(entropy, margin)", 2)(logits)[2] == pytest.approx(0.5, abs=1e-6)
    # vacuity 2 / (2 + 3 ln 2) = 0.490 over 0.5, and 1.87 over 1.5
    assert policy_of(NESTED, 2)(logits)[2] == pytest.approx(h / 0.3 / 1.5, abs=1e-6)


@pytest.mark.parametrize("size", [2, 3, 10, 1000])
def test_a_composition_is_the_largest_or_smallest_of_scipys_measures(size: int) -> None:
    logits = random_logits(30, size)
    u = by_scipy(logits)
    both = np.stack([u["entropy"] / 0.3, u["margin"] / 0.2])
    np.testing.assert_allclose(uncertainties(ALL, logits), both.max(axis=0), rtol=1e-9)
    np.testing.assert_allclose(uncertainties(ANY, logits), both.min(axis=0), rtol=1e-9)
    nested = np.maximum(u["vacuity"] / 0.5, both.min(axis=0) / 1.5)
    np.testing.assert_allclose(uncertainties(NESTED, logits), nested, rtol=1e-9)


@pytest.mark.parametrize("text", [*POLICIES, ALL, ANY, NESTED, "any(vacuity, margin)"])
@pytest.mark.parametrize("size", [2, 10])
def test_numpy_and_torch_compute_the_same_uncertainty(text: str, size: int) -> None:
    logits = random_logits(100, size)
    by_torch = uncertainty_of(read_gate(text), torch.from_numpy(logits)).numpy()
    np.testing.assert_allclose(uncertainties(text, logits), by_torch, rtol=1e-7, atol=1e-12)


def test_at_the_threshold_1_each_scale_is_its_measures_own_threshold() -> None:
    logits = random_logits()
    by_entropy = uncertainties("entropy", logits) < 0.3
    by_margin = uncertainties("margin", logits) < 0.2
    assert 0 < (by_entropy & by_margin).sum() < (by_entropy | by_margin).sum()
    for text, expected in ((ALL, by_entropy & by_margin), (ANY, by_entropy | by_margin)):
        gate = gate_from(GateSpec(text, 1.0), 10)
        assert [gate.decide(row).exit for row in logits] == expected.tolist()


def test_probabilities_are_of_the_measure_named_first() -> None:
    row = random_logits(1)[0]
    for text, measure in ((ALL, entropy), ("any(vacuity, margin)", vacuity)):
        label, probabilities, _ = policy_of(text, 10)(row)
        assert label == int(row.argmax())
        np.testing.assert_array_equal(probabilities, measure(row)[1])
        np.testing.assert_array_equal(answer_policy(GateSpec(text, 1.0))(row)[1], measure(row)[1])


@pytest.mark.parametrize("text", [ALL, ANY, NESTED])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("error")
def test_nan_and_infinity_never_exit(text: str, value: float) -> None:
    decision = Gate(policy_of(text, 3), math.inf).decide(np.array([1, value, 3], np.float32))
    assert not decision.exit
    assert math.isnan(decision.uncertainty)


@pytest.mark.parametrize("order", ["margin:0.2, entropy:0.3", "entropy:0.3, margin:0.2"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_measure_without_a_value_makes_the_composition_nan_in_any_order(order: str) -> None:
    logits = np.array([1, -np.inf, 3], np.float32)  # entropy is 0 * inf there, margin is a number
    assert math.isnan(policy_of(f"any({order})", 3)(logits)[2])


@pytest.mark.parametrize("text", [*POLICIES, ALL, ANY, NESTED, "all(entropy, margin)"])
def test_no_uncertainty_is_above_the_largest(text: str) -> None:
    even = np.full((1, 10), -1e4, np.float32)  # no evidence, and a tie
    largest = largest_uncertainty(text, 10)
    assert uncertainties(text, even)[0] == pytest.approx(largest, rel=1e-12)
    assert uncertainties(text, random_logits()).max() <= largest


def test_the_users_gate_keeps_the_networks_probabilities() -> None:
    spec, row = GateSpec("vacuity", 0.4), random_logits(1)[0]
    gate = gate_from(spec, 10, text="margin", threshold=0.3)
    decision = gate.decide(row)
    assert decision.uncertainty == margin(row)[2]
    assert decision.threshold == 0.3
    np.testing.assert_array_equal(decision.probabilities, vacuity(row)[1])
    assert gate_from(spec, 10, text=ALL).threshold == 1.0
    assert gate_from(spec, 10, text=ALL, threshold=0.5).threshold == 0.5


@pytest.mark.parametrize("text", ["entropy", "all(entropy, margin)", "all(entropy:0.3, margin)"])
def test_a_users_gate_without_a_threshold_of_its_own_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected it with a threshold"):
        AgentSettings(gate=text)
    assert AgentSettings(gate=text, threshold=0.4).gate == text
    assert AgentSettings(gate=text, controller=Budget(0.2)).gate == text
    with pytest.raises(ConfigurationError, match="gate and agreement: expected one of them"):
        AgentSettings(gate=text, controller=Agreement(0.1))


@pytest.mark.parametrize("text", ["margin", ALL, ANY])
def test_a_budget_holds_on_a_users_gate(text: str) -> None:
    spec = GateSpec("entropy", 0.01)
    gate = gate_from(spec, 10, text=text)
    control = control_from(Budget(0.25), spec, gate)
    assert control is not None
    logits = random_logits(2000)
    offloads = sum(not control.decide(row)[0].exit for row in logits)
    # what the stream earns, and at most the 50 that may be saved
    assert 0.25 * 2000 - 50 <= offloads <= 0.25 * 2000 + 50


def test_an_option_for_the_gate_leaves_the_files_threshold_aside() -> None:
    file = AgentSettings(threshold=0.7, codec="fp16")
    assert AgentOptions(gate=ALL).settings(file) == AgentSettings(gate=ALL, codec="fp16")
    both = AgentOptions(gate="margin", threshold=0.2).settings(file)
    assert both == AgentSettings(gate="margin", threshold=0.2, codec="fp16")
    with pytest.raises(ConfigurationError, match="expected it with a threshold"):
        AgentOptions(gate="margin").settings(file)
    with pytest.raises(ConfigurationError, match="got luck"):
        AgentOptions(gate="luck", threshold=0.2).settings(file)
    # a threshold alone is for the file's gate
    composed = AgentSettings(gate=ALL)
    assert AgentOptions(threshold=0.5).settings(composed) == AgentSettings(gate=ALL, threshold=0.5)


def test_the_status_names_the_gate_in_force(digits: Digits) -> None:
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    for gate, named in ((None, "entropy"), (ALL, ALL)):
        with EdgeAgent.from_bundle(folder, AgentSettings(offload=False, gate=gate)) as agent:
            status = agent.status()
            assert status.gate == named
            assert (status.threshold == 1.0) == (gate is not None)


def test_a_settings_file_names_the_gate() -> None:
    file = SettingsFile.from_toml(b'[agent]\ngate = "any(vacuity:0.4, margin:0.2)"\n')
    assert file.agent == AgentSettings(gate="any(vacuity:0.4, margin:0.2)")
    with pytest.raises(ConfigurationError, match=r"\[agent\]: gate 'any\(margin\)': expected two"):
        SettingsFile.from_toml(b'[agent]\ngate = "any(margin)"\n')


@pytest.mark.parametrize("text", ["margin", "all(entropy:0.3, vacuity-exp)"])
def test_a_recipe_names_the_gate(text: str) -> None:
    table = {
        "method": "besplit",
        "gate": text,
        "data": {"name": "digits", "clients": 2},
        "train": {"backbone": "tiny", "rounds": 1, "batch": 8, "learning_rate": 0.1},
    }
    recipe = read_recipe(table)
    assert (recipe.gate, recipe.built_method.gate) == (text, text)
    assert read_recipe({**table, "gate": None}).built_method.gate == "vacuity-exp"
    with pytest.raises(ConfigurationError, match="recipe: gate 'luck': expected entropy"):
        read_recipe({**table, "gate": "luck"})
    other = "expected vacuity-exp for a network that learnt evidence as exp, got vacuity"
    with pytest.raises(ConfigurationError, match=other):
        _ = read_recipe({**table, "gate": "any(margin, vacuity)"}).built_method


def test_the_document_shows_gates_that_are_read() -> None:
    document = Document("docs/gates.md")
    file = SettingsFile.from_toml(document.snippet("settings").encode())
    assert file.agent == AgentSettings(gate="all(entropy:0.3, margin:0.2)")
    shown = set(re.findall(r"(?:all|any)\([^`'\"]*\)", document.text))
    assert len(shown) >= 5
    for text in shown:
        read_gate(text)


def test_a_text_at_its_longest_runs_though_its_numbers_would_be_written_longer() -> None:
    terms = ["margin:1"] * 19
    text = f"any({', '.join(terms)})"
    assert len(text) <= 200 < len(str(read_gate(text)))
    gate = gate_from(GateSpec("entropy", 0.5), 10, text=text)
    assert (gate.threshold, GATE.accepts(text)) == (1.0, True)
