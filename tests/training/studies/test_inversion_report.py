"""The benchmark of inversion attacks: its runs and its report; its figures are not tested."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from benchmarks.attacks.inversion import Attacker, Leak
from benchmarks.inversion import ENHANCED, PLAIN, SCALES, VARIANTS, Trial, main, report


def trial(variant: str, seed: int, accuracy: float, leaked: float, depth: int = 2) -> Trial:
    return Trial(variant, depth, seed, accuracy, Leak(leaked, 0.5, 20.0, 0.07, 0.4))


def test_a_report_has_means_and_spreads_by_hand() -> None:
    trials = [
        trial(variant, seed, accuracy, leaked)
        for variant in VARIANTS
        for seed, accuracy, leaked in ((0, 0.9, 0.01), (1, 0.8, 0.03))
    ]
    assert "split point" not in report("digits", trials)
    trials += [trial(variant, 0, 0.7, 0.09, depth=3) for variant in (PLAIN, ENHANCED)]
    lines = report("digits", trials).splitlines()
    # of 90 and 80: mean 85, deviation sqrt(2 * 5^2 / 1) = 7.1; of .01 and .03: .02, .0141
    row = "| SCALA | 85.0 ± 7.1 | 0.0200 ± 0.0141 | 0.500 ± 0.000 | 20.0 ± 0.0 |"
    assert row in lines
    assert "| blind guess | | 0.0700 | 0.400 | |" in lines
    # another cut is in no row but its own
    assert f"| {PLAIN}, cut after stage 2 |{row.removeprefix('| SCALA |')}" in lines
    assert f"| {ENHANCED}, cut after stage 3 | 70.0 | 0.0900 | 0.500 | 20.0 |" in lines
    assert "| paper: CIFAR-10, SCALA-PE | 89.08 | 0.0051 | 0.814 | 23.33 |" in lines


def test_every_variant_is_trained_and_attacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(SCALES["digits"], train_max=80, test_max=40, attacker=Attacker(8, 0, epochs=9))
    monkeypatch.setitem(SCALES, "digits", small)
    main("digits", seeds=1, images=10, rounds=1, epochs=1, results=tmp_path)
    written = orjson.loads((tmp_path / "inversion-digits.json").read_bytes())
    tried = [(one["variant"], one["depth"]) for one in written["trials"]]
    others = [(variant, depth) for depth in small.cuts for variant in (PLAIN, ENHANCED)]
    assert tried == [(variant, 2) for variant in VARIANTS] + others
    assert (written["scale"]["rounds"], written["scale"]["attacker"]["epochs"]) == (1, 1)
    text = (tmp_path / "inversion-digits.md").read_text()
    assert "inversion digits --seeds 1 --images 10 --rounds 1 --epochs 1`" in text
    out = capsys.readouterr().out
    assert all(line in out for line in text.splitlines() if line.startswith("|"))
