"""Three choices of a threshold: worked by hand, and what each of them may read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.training.recipe.recipe import read_recipe
from server.training.report.client_scores import by_choice
from server.training.report.evaluate import Evaluator
from server.training.report.report import report_of
from server.training.report.thresholds import (
    CHOICES,
    Choice,
    PairAnswers,
    best_threshold,
    chosen_thresholds,
    right_answers,
    threshold_grid,
)
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

GRID = (0.5, 1.0, 2.0)


def pair(*samples: tuple[float, int, int]) -> PairAnswers:
    """Samples as (uncertainty, exit right, server right)."""
    columns = np.array(samples, np.float64).reshape(-1, 3)
    return PairAnswers(columns[:, 0], columns[:, 1] == 1, columns[:, 2] == 1)


# Six samples of a client. Right answers with the threshold
#     0.5: exits a, b (1 + 1), server c to f (0 + 1 + 1 + 1): 5
#     1.0: exits a to d (1 + 1 + 1 + 0), server e, f (1 + 1): 5
#     2.0: exits all: 1 + 1 + 1 + 0 + 0 + 0 = 3
TESTED = pair((0.1, 1, 0), (0.4, 1, 1), (0.6, 1, 0), (0.9, 0, 1), (1.5, 0, 1), (1.9, 0, 1))


def chosen(
    held_out: dict[str, PairAnswers], tested: dict[str, PairAnswers]
) -> dict[Choice, dict[str, float]]:
    """Thresholds by each choice; clients without held-out samples give no counts."""
    own = {name: right_answers(GRID, each) for name, each in held_out.items() if len(each)}
    return chosen_thresholds(
        GRID, own, {name: right_answers(GRID, each) for name, each in tested.items()}
    )


def test_right_answers_of_six_samples_by_hand() -> None:
    assert [int(TESTED.right(point).sum()) for point in GRID] == [5, 5, 3]
    assert TESTED.exits(1.0).tolist() == [True, True, True, True, False, False]
    assert TESTED.exits(0.9).tolist() == [True, True, True, False, False, False]  # not at equality
    assert best_threshold(GRID, right_answers(GRID, TESTED)) == 1.0  # the looser of two equals


def test_weights_of_samples_count_in_a_choice() -> None:
    # a and b weigh 3 each of 6, the others nothing: 1 + 1 of 2 by the exit
    weighted = replace(TESTED, weights=np.array([3.0, 3.0, 0, 0, 0, 0]))
    assert [weighted.count(point) for point in GRID] == [6, 6, 6]
    assert best_threshold(GRID, right_answers(GRID, weighted)) == 2.0
    # a, which exits above 0.1, weighs 1 of 4, and c, which exits above 0.6, 3 of 4
    weighted = replace(TESTED, weights=np.array([1.5, 0, 4.5, 0, 0, 0]))
    assert [weighted.exit_rate(point) for point in (0.1, 0.5, 1.0)] == [0, 1 / 4, 1]


def test_three_choices_by_hand() -> None:
    # a's own data have it exit always (2 of 2 against 0 and 1); b's never above 0.5 (3 of 3)
    a = pair((0.8, 1, 0), (1.8, 1, 0))
    b = pair((0.7, 0, 1), (0.9, 0, 1), (1.2, 0, 1))
    # together, of five: 0.5 has 0 + 3, 1.0 has 1 + 1, 2.0 has 2 + 0
    found = chosen({"a": a, "b": b}, {"a": TESTED, "b": TESTED})
    assert found == {
        "held_out": {"a": 2.0, "b": 0.5},
        "fleet": {"a": 0.5, "b": 0.5},
        "oracle": {"a": 1.0, "b": 1.0},
    }


def test_where_own_samples_leave_several_the_fleets_decide() -> None:
    # for a all three are equal; for b 0.5 and 1.0; the fleet has 1 + 2, 1 + 2 and 1 + 0
    a, b = pair((0.1, 1, 0)), pair((1.2, 0, 1), (1.4, 0, 1))
    assert [a.count(point) for point in GRID] == [1, 1, 1]
    found = chosen({"a": a, "b": b}, {"a": TESTED, "b": TESTED})
    assert found["held_out"] == {"a": 1.0, "b": 1.0}
    assert found["fleet"] == {"a": 1.0, "b": 1.0}
    # by itself, a takes the loosest
    alone = chosen({"a": a}, {"a": TESTED})
    assert alone["held_out"] == {"a": 2.0}


def test_client_without_held_out_samples_takes_the_fleets_threshold() -> None:
    held_out = {"a": pair((0.8, 1, 0)), "b": pair()}
    found = chosen(held_out, {"a": TESTED, "b": TESTED})
    assert found["held_out"] == {"a": 2.0, "b": 2.0}
    assert found["fleet"] == {"a": 2.0, "b": 2.0}


def test_without_held_out_samples_the_oracle_is_left() -> None:
    assert chosen({"a": pair()}, {"a": TESTED}) == {"oracle": {"a": 1.0}}
    assert chosen({}, {"a": pair()}) == {"oracle": {"a": 2.0}}


samples = st.lists(
    st.tuples(st.sampled_from([0.2, 0.7, 1.5, 3.0]), st.booleans(), st.booleans()), max_size=12
)


@given(st.lists(st.tuples(samples, samples), min_size=1, max_size=4))
def test_no_choice_is_above_the_oracle(clients: list[tuple[Any, Any]]) -> None:
    held_out = {str(at): pair(*own) for at, (own, _) in enumerate(clients)}
    tested = {str(at): pair(*test) for at, (_, test) in enumerate(clients)}
    found = chosen(held_out, tested)
    for name, answers in tested.items():
        right = {choice: answers.right(each[name]).sum() for choice, each in found.items()}
        assert right["oracle"] == max(right.values())


@given(samples.filter(len))
def test_one_client_that_is_held_out_what_it_is_tested_on_has_one_threshold(own: Any) -> None:
    answers = pair(*own)
    found = chosen({"a": answers}, {"a": answers})
    assert list(found) == list(CHOICES)
    assert len({each["a"] for each in found.values()}) == 1


def test_a_grid_is_in_the_gates_unit() -> None:
    assert threshold_grid("entropy", 10) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.3])
    # the largest 1 - (p1 - p2) is 1
    assert threshold_grid("margin", 10)[-1] == pytest.approx(2.3 / np.log(10))


@pytest.fixture(scope="module")
def trained() -> tuple[Simulation, list[dict[str, Any]]]:
    """Four clients whose exits at depth 1 know less than the server, and at depth 3 more."""
    data = {"partition": "dirichlet", "numbers": {"concentration": 1.0}, "train_max": 600}
    simulation = build_simulation(
        read_recipe(
            {
                "method": "supersfl",
                "method_numbers": {"share_exits": True},
                "data": {"name": "digits", "clients": 4} | data,
                "train": {"backbone": "tiny", "rounds": 5, "epochs": 2, "depths": [1, 3]}
                | {"learning_rate": 0.1, "momentum": 0.9, "batch": 16},
                "evaluate": {"every": 5},
            }
        )
    )
    rows: list[dict[str, Any]] = []
    list(run_rounds(simulation, rows))
    return simulation, rows


def test_held_out_and_fleet_read_no_label_of_the_test_part(
    trained: tuple[Simulation, Any],
) -> None:
    simulation, _ = trained
    turned = np.random.default_rng(0).permutation(simulation.y_test)
    assert (turned != simulation.y_test).mean() > 0.8
    before = by_choice(Evaluator(simulation).clients(supervised=True))
    after = by_choice(Evaluator(replace(simulation, y_test=turned)).clients(supervised=True))

    def thresholds(found: Any, choice: str) -> list[float]:
        return [score.threshold for score in found[choice]]

    for choice in ("held_out", "fleet"):
        assert thresholds(before, choice) == thresholds(after, choice)
    oracles = [[score.accuracy for score in found["oracle"]] for found in (before, after)]
    assert oracles[0] != oracles[1]  # the labels did change


def test_the_oracle_reads_them() -> None:
    # with all answers of the test samples the other way round: 1, 1 and 3 right
    turned = replace(TESTED, exit_right=~TESTED.exit_right, server_right=~TESTED.server_right)
    before, after = (chosen({"a": TESTED}, {"a": tested}) for tested in (TESTED, turned))
    assert (before["oracle"], after["oracle"]) == ({"a": 1.0}, {"a": 2.0})
    assert (before["held_out"], before["fleet"]) == (after["held_out"], after["fleet"])


def test_a_report_has_the_three_and_its_own_figures_are_the_held_out_ones(
    trained: tuple[Simulation, list[dict[str, Any]]],
) -> None:
    simulation, rows = trained
    report = report_of(simulation, rows)
    final, found = report["final"], report["final"]["by_threshold"]
    assert final["threshold_chosen_on"] == "held_out"
    assert list(found) == ["held_out", "fleet", "oracle"]
    assert [each["chosen_on"] for each in found.values()] == ["held_out", "held_out", "test"]
    for figure in ("accuracy_id", "accuracy_ood", "accuracy_clients", "jain", "std"):
        assert final[figure] == pytest.approx(found["held_out"][figure], nan_ok=True)
    most = max(found.values(), key=lambda each: float(each["accuracy_clients"]))
    assert most["accuracy_clients"] == found["oracle"]["accuracy_clients"]
    for client in report["each_client"]:
        own = client["by_threshold"]
        assert client["threshold"] == own["held_out"]["threshold"]
        assert client["exit_rate"] == own["held_out"]["exit_rate"]
        assert client["accuracy_id"] == own["held_out"]["accuracy_id"]
        assert own["fleet"]["threshold"] == found["fleet"]["threshold"]


def test_the_three_agree_where_one_client_is_held_out_its_test_samples(
    trained: tuple[Simulation, Any],
) -> None:
    simulation, _ = trained
    name = next(iter(simulation.clients))
    test = Evaluator(simulation)._tests[name]
    alone = replace(
        simulation,
        clients={name: simulation.clients[name]},
        x_held_out=simulation.x_test,
        y_held_out=simulation.y_test,
        held_out={name: np.concatenate([test.id, test.ood])},
    )
    (score,) = Evaluator(alone).clients(supervised=True)
    assert len({each.threshold for each in score.gated.values()}) == 1
    assert len({(each.inside, each.outside) for each in score.gated.values()}) == 1


def test_a_run_that_holds_nothing_out_says_that_its_threshold_is_the_oracles(
    trained: tuple[Simulation, list[dict[str, Any]]],
) -> None:
    simulation, rows = trained
    nothing = {name: rows[:0] for name, rows in simulation.held_out.items()}
    final = report_of(replace(simulation, held_out=nothing), rows)["final"]
    assert final["threshold_chosen_on"] == "test"
    assert list(final["by_threshold"]) == ["oracle"]
    whole = report_of(simulation, rows)["final"]["by_threshold"]
    assert final["accuracy_clients"] == whole["oracle"]["accuracy_clients"]
