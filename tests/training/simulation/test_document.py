"""The path from a run to a device, as docs/training.md has it, typed."""

from __future__ import annotations

from pathlib import Path

from sklearn.datasets import load_digits

from edge_sdk import AgentSettings, EdgeAgent
from exporters.run.record import read_run
from tests.reader import Document, Reader, started_server

DOCUMENT = Document("docs/training.md")


def test_a_simulation_becomes_an_answering_device(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text(DOCUMENT.snippet("recipe"))
    printed = Reader(tmp_path).shell(DOCUMENT.snippet("train"))
    # each command ends with the next one
    assert "Next: splitedge export --run run --out server/models --name run" in printed
    assert "Next: splitedge server run --state server" in printed
    record = read_run(tmp_path / "run")
    assert record.exits == (1, 2)
    whole = record.score("whole", 2)
    assert whole is not None
    assert whole.right > 0.5 * whole.samples  # it learns something in its seconds
    with started_server(tmp_path, DOCUMENT.snippet("serve")) as reader:
        answer = reader.shell(DOCUMENT.snippet("device"))
        assert "digits/1/d" in answer
        x = load_digits().images[:20, None].astype("f4")
        with EdgeAgent.open(tmp_path / "device", AgentSettings(deadline_s=20.0)) as agent:
            sources = {answer.source for answer in agent.predict_many(x)}
        assert sources <= {"device", "server"}
