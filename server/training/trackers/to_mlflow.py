"""Runs of MLflow, through its own client: a tracking server, or a database file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from edge_sdk.errors import ConfigurationError, StorageError
from server.training.trackers.runs import TrackedRun

DIGEST: Final = "splitedge.report"  # tag of a run: SHA-256 of the report that it was made from
_PARAMETERS_MOST: Final = 100  # of one call, by MLflow's protocol
_METRICS_MOST: Final = 1000
_PARAMETER_CHARACTERS: Final = 6000
_SETTINGS: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would report its use elsewhere
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # its 7 are minutes before a missing server is told
}


def log_run(run: TrackedRun, uri: str, experiment: str) -> bool:
    """Log a training as a run of that experiment, which is made where there is none.

    Returns: False for a report that the experiment has already.
    Raises: ConfigurationError for a URI that MLflow would take for a folder; StorageError where
        MLflow refuses, or its server does not answer.
    """
    if "://" not in uri or uri.startswith("file:"):  # folders are what newer MLflow refuses
        raise ConfigurationError(
            f"--mlflow {uri}: expected the URI of a database or of a tracking server, such as"
            " sqlite:///mlflow.db or http://127.0.0.1:5000"
        )
    for key, value in _SETTINGS.items():
        os.environ.setdefault(key, value)
    from mlflow import MlflowClient  # noqa: PLC0415 - an extra, and slow
    from mlflow.entities import Metric, Param  # noqa: PLC0415
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    at = round(1000 * run.written_at)
    metrics = [Metric(_name(key), value, at, step) for key, value, step in _metrics(run)]
    texts = _cut(run.parameters)
    parameters = [Param(key, value) for key, value in texts.items()]
    try:
        client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if known is None else known.experiment_id
        if client.search_runs([number], f"tags.`{DIGEST}` = '{run.digest}'"):
            return False
        logged = client.create_run(number, run_name=run.name, start_time=at)
        key = logged.info.run_id
        for some in _parts(parameters, _PARAMETERS_MOST):
            client.log_batch(key, params=some)
        for some in _parts(metrics, _METRICS_MOST):
            client.log_batch(key, metrics=some)
        # last: a run that a stop left half made is not taken for a whole one
        client.set_tag(key, DIGEST, run.digest)
        client.set_terminated(key, end_time=at)
    except MlflowException as err:
        raise StorageError(
            f"--mlflow {uri}: MLflow takes no run there; look at the URI, and that its server runs"
            f" ({err})"
        ) from err
    return True


def _metrics(run: TrackedRun) -> Iterator[tuple[str, float, int]]:
    """Name, value and step of every figure."""
    for number, figures in run.rounds:
        for name, value in figures.items():
            yield f"round/{name}", value, number
    for name, value in run.final.items():
        yield f"final/{name}", value, run.last_round


def _name(text: str) -> str:
    """A name of MLflow's: other characters, as class names may have them, become `_`."""
    return re.sub(r"[^\w./ :-]", "_", text)


def _cut(parameters: Mapping[str, str]) -> dict[str, str]:
    return {_name(key): value[:_PARAMETER_CHARACTERS] for key, value in parameters.items()}


def _parts(values: list[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), most):
        yield values[start : start + most]
