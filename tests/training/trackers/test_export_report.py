"""`splitedge export-report`, as docs/comparing.md has it: TensorBoard and MLflow read it back."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from server.training.recipe.recipe import read_recipe
from server.training.simulation.run import simulate
from server.training.trackers.runs import find_runs
from server.training.trackers.to_mlflow import log_run
from tests.commands import Splitedge
from tests.reader import Document, Reader, environment, free_ports

DOCUMENT = Document("docs/comparing.md")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two recipes were compared."""
    home = tmp_path_factory.mktemp("home")
    for seed in (0, 1):
        recipe = read_recipe(
            {
                "method": "splitfed-v1",
                "seed": seed,
                "data": {"name": "digits", "clients": 2, "train_max": 200},
                "train": {"backbone": "tiny", "rounds": 3, "batch": 50, "learning_rate": 0.05}
                | {"depth": 2},
                "energy": {"idle_w": 2.0, "busy_w": 6.0, "co2_g_kwh": 400.0},
            }
        )
        simulate(recipe, home / "splitedge-runs" / "compare" / f"splitfed-{seed}")
    return home


def report_of(home: Path, name: str) -> dict[str, Any]:
    path = home / "splitedge-runs" / "compare" / name / "report.json"
    found: dict[str, Any] = orjson.loads(path.read_bytes())
    return found


def test_both_trackers_have_every_figure_of_the_reports(trained: Path) -> None:
    reader = Reader(trained)
    for printed in (reader.shell(DOCUMENT.snippet("trackers")) for _ in range(2)):
        assert "Next: tensorboard --logdir events" in printed
    for name in ("splitfed-0", "splitfed-1"):
        report = report_of(trained, name)
        curve = [row["accuracy"] for row in report["rounds"]]
        final = report["final"]
        # a second export takes the place of the first
        assert len(list((trained / "events" / name).iterdir())) == 1
        events = EventAccumulator(str(trained / "events" / name))
        events.Reload()
        found = [(one.step, one.value) for one in events.Scalars("round/accuracy")]
        assert found == [(at, pytest.approx(value)) for at, value in enumerate(curve, start=1)]
        taken = [one.value for one in events.Scalars("round/processor_s")]
        assert taken == pytest.approx([row["processor_s"] for row in report["rounds"]])
        (last,) = events.Scalars("final/class/3")
        assert (last.step, last.value) == (3, pytest.approx(final["accuracy_by_class"]["3"]))
        text = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]
        assert b"| train.learning_rate | 0.05 |" in text

        client = MlflowClient(f"sqlite:///{trained}/mlflow.db")
        experiment = client.get_experiment_by_name("splitedge")
        assert experiment is not None
        (run,) = client.search_runs(
            [experiment.experiment_id], f"attributes.run_name = '{name}'"
        )  # one, though it was exported twice
        assert run.info.status == "FINISHED"
        assert run.data.params["seed"] == name[-1]
        assert run.data.params["train.learning_rate"] == "0.05"
        history = client.get_metric_history(run.info.run_id, "round/accuracy")
        assert sorted((one.step, one.value) for one in history) == list(enumerate(curve, start=1))
        assert run.data.metrics["final/co2_g"] == report["energy"]["co2_g"]
        assert run.data.metrics["final/accuracy"] == final["accuracy"]


def test_names_that_mlflow_refuses_are_changed(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    report = report_of(trained, "splitfed-0")
    report["final"]["accuracy_by_class"] = {"cats & dogs": 0.5, "t-shirt/top": None}
    report["rounds"][0]["loss"] = None  # not defined in the first round
    (folder / "report.json").write_bytes(orjson.dumps(report))
    (run,) = find_runs(folder)
    uri = f"sqlite:///{trained}/mlflow.db"
    assert log_run(run, uri, "odd")
    assert not log_run(run, uri, "odd")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("odd")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.metrics["final/class/cats _ dogs"] == 0.5
    assert "final/class/t-shirt/top" not in found.data.metrics
    assert len(client.get_metric_history(found.info.run_id, "round/loss")) == 2


def test_a_tracking_server_that_is_away_is_told_soon(trained: Path) -> None:
    run = "splitedge-runs/compare/splitfed-0"
    uri = f"http://127.0.0.1:{free_ports(1)[0]}"
    done = subprocess.run(
        ["splitedge", "export-report", run, "--mlflow", uri],
        cwd=trained,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,  # MLflow's own seven attempts take four minutes
        check=False,
    )
    assert done.returncode == 1
    assert f"error: --mlflow {uri}: MLflow takes no run there" in done.stderr


def test_what_cannot_be_exported_is_told(
    splitedge: Splitedge, trained: Path, tmp_path: Path
) -> None:
    run = trained / "splitedge-runs" / "compare" / "splitfed-0"
    assert (
        "expected --tensorboard DIR, --mlflow URI or both"
        in splitedge("export-report", run).refusal
    )
    to = ("--tensorboard", tmp_path / "events")
    assert "expected report.json of a training" in splitedge("export-report", tmp_path, *to).refusal
    assert "got splitfed-0 twice" in splitedge("export-report", run, run, *to).refusal
    assert not (tmp_path / "events").exists()
    assert (
        "--mlflow nosuch://x: " in splitedge("export-report", run, "--mlflow", "nosuch://x").refusal
    )
    for folder in ("mlruns", f"file://{tmp_path}/mlruns"):
        refused = splitedge("export-report", run, "--mlflow", folder).refusal
        assert "such as sqlite:///mlflow.db or http://127.0.0.1:5000" in refused
    (tmp_path / "report.json").write_bytes(
        orjson.dumps({"recipe": {}, "final": {}, "rounds": [{"accuracy": 0.5}]})
    )
    assert "expected the report of a training" in splitedge("export-report", tmp_path, *to).refusal
    (tmp_path / "report.json").write_text("{}")
    assert "expected the report of a training" in splitedge("export-report", tmp_path, *to).refusal
