"""`splitedge compare`, as docs/comparing.md has it."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.commands import Splitedge
from tests.reader import ROOT, Document, Reader

DOCUMENT = Document("docs/comparing.md")
RECIPES = ROOT / "examples" / "recipes"


def test_two_methods_are_compared(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = Reader(tmp_path).shell(DOCUMENT.snippet("compare"))
    out = tmp_path / "splitedge-runs" / "compare"
    found = orjson.loads((out / "comparison.json").read_bytes())
    assert list(found["recipes"]) == ["fedavg-digits", "supersfl-digits"]
    assert found["seeds"] == 2
    for name, each in found["recipes"].items():
        assert f"{100 * each['accuracy']['mean']:.2f} ± " in printed
        assert f"{name}: train.learning_rate = " in printed
        assert len(each["tuning"]) == 2
        assert each["recipe"]["train"]["rounds"] == 3
    assert "written to splitedge-runs/compare: comparison.md" in printed
    table = (out / "comparison.md").read_text()
    for heading in ("against fedavg-digits, points", "reached 50 %", "clients, %"):
        assert heading in table
        assert heading in DOCUMENT.text


def test_what_cannot_be_compared_is_told_before_anything_is_trained(
    splitedge: Splitedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fedavg, scala = RECIPES / "fedavg-digits.toml", RECIPES / "scala-digits.toml"
    assert "expected two or more recipes" in splitedge("compare", fedavg).refusal
    assert "got fedavg-digits twice" in splitedge("compare", fedavg, fedavg).refusal
    words = ("compare", fedavg, scala)
    refused = splitedge(*words, "--set", "train.rounds").refusal
    assert "--set train.rounds: expected NAME=VALUE" in refused
    refused = splitedge(*words, "--set", "train.rounds=1,2").refusal
    assert "expected one value, got 2; --tune tries several" in refused
    refused = splitedge(*words, "--set", "train.speed=1").refusal
    assert "--set, for" in refused
    assert "fedavg-digits.toml: " in refused
    refused = splitedge(*words, "--tune", "method_numbers.mu=0.1").refusal
    assert "--tune, for fedavg-digits: " in refused
    assert "--target 0: expected an accuracy" in splitedge(*words, "--target", "0").refusal
    assert not any(tmp_path.iterdir())
