"""`splitedge agent predict`: files to answers, by the agent that runs here or by one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_sdk.cli.agent_options import (
    STATE_DEFAULT,
    AgentOptions,
    AsJson,
    Codec,
    Deadline,
    Delta,
    Gate,
    LateAnswers,
    Limit,
    Local,
    Personal,
    RawInputs,
    State,
    Threads,
    Threshold,
)
from edge_sdk.cli.output import print_json, print_table

if TYPE_CHECKING:
    from edge_sdk.manifest import TensorSpec
    from edge_sdk.service.client import RunningAgent
    from edge_sdk.session import Array

# a running agent takes these for one request; the others are settings of the agent as a whole
PER_REQUEST = ("--deadline", "--threshold", "--local")
COLUMNS = ("input", "label", "class", "source", "uncertainty", "threshold", "ms", "reason")


def predict(
    files: Annotated[
        list[Path],
        typer.Argument(help=".npy arrays (one sample or several), or images (pixels 0..255)."),
    ],
    state: State = STATE_DEFAULT,
    deadline: Deadline = None,
    gate: Gate = None,
    threshold: Threshold = None,
    budget: Limit = None,
    agreement: Delta = None,
    codec: Codec = None,
    raw_inputs: RawInputs = None,
    threads: Threads = None,
    late_answers: LateAnswers = None,
    local: Local = False,
    personal: Personal = None,
    as_json: AsJson = False,
) -> None:
    """Classify files: on the device if it is sure, else on the server.

    If an agent runs on the state folder, it is asked; --deadline, --threshold and --local then hold
    for these files only, and the other settings are its own.
    """
    from edge_sdk.service.client import RunningAgent
    from edge_sdk.settings_file.settings_file import SettingsFile

    options = AgentOptions(
        deadline_s=deadline,
        gate=gate,
        threshold=threshold,
        limit=budget,
        delta=agreement,
        codec=codec,
        raw_inputs=raw_inputs,
        threads=threads,
        late_answers=late_answers,
        personal=personal,
        local=local,
    )
    settings = options.settings(SettingsFile.load(state).agent)
    running = RunningAgent.find(state)
    if running is None:
        from edge_sdk import EdgeAgent

        with EdgeAgent.open(state, settings) as agent:
            named = _read(files, agent.manifest.input)
            answers = agent.predict_many(sample for _, sample in named)
            rows = [_row(name, answer) for (name, _), answer in zip(named, answers, strict=True)]
    else:
        rows = list(_ask(running, files, options))
    if as_json:
        print_json(rows)
    else:
        _show(rows)


def _ask(
    running: RunningAgent, files: list[Path], options: AgentOptions
) -> Iterator[dict[str, Any]]:
    """The rows of the files, by the running agent."""
    from edge_sdk.errors import ConfigurationError

    whole = [name for name in options.given() if name not in PER_REQUEST]
    if whole:
        raise ConfigurationError(
            f"{', '.join(whole)}: an agent runs here with settings of its own; give the option to"
            " `splitedge agent run`, or stop that agent"
        )
    parameters: dict[str, Any] = {"local": options.local}
    if options.deadline_s is not None:
        parameters["deadline_ms"] = options.deadline_s * 1e3
    if options.threshold is not None:
        parameters["threshold"] = options.threshold
    named = _read(files, running.input())
    answers = running.predict((sample for _, sample in named), parameters)
    for (name, _), answer in zip(named, answers, strict=True):
        yield {"input": name, **answer}


def _read(files: list[Path], spec: TensorSpec) -> list[tuple[str, Array]]:
    """The samples of all files; what was done to pictures is said once."""
    from edge_sdk.pipeline.samples import read_samples
    from edge_sdk.pipeline.words import printable

    changes: list[str] = []
    named = [
        (printable(name), sample)
        for file in files
        for name, sample in read_samples(file, spec, changes.append)
    ]
    if changes:
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        typer.echo(f"note: {changes[0]}{more}", err=True)
    return named


def _row(name: str, answer: Any) -> dict[str, Any]:
    from edge_sdk.service.inference import as_row

    return {"input": name, **as_row(answer)}


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(
            row["input"],
            str(row["label"]),
            row["class_name"],
            row["source"],
            _number(row["uncertainty"], 4),
            _number(row["threshold"], 4),
            _number(row["latency_ms"], 3),
            row["reason"],
        )
    print_table(table)


def _number(value: float | None, digits: int) -> str:
    """A number with its digits; one that is not finite came as null."""
    return "none" if value is None else f"{value:.{digits}f}"
