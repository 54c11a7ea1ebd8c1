"""The benchmark of privacy: its measures by hand, its runs and its report; not its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch
import typer

from benchmarks.attacks.inversion import Attacker
from benchmarks.attacks.labels import auc, by_norm
from benchmarks.attacks.membership import by_loss
from benchmarks.privacy.__main__ import privacy
from benchmarks.privacy.images import CLIP, Pictures, Sent
from benchmarks.privacy.labels import gradients
from benchmarks.privacy.report import write_report
from benchmarks.privacy.worlds import SCALES, Trial, World
from edge_sdk.nets import build


def test_members_are_found_as_counted_by_hand() -> None:
    """FAULTS row 33: three of four pairs are in order, and one member is below every other loss."""
    result = by_loss(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 0.9]))
    assert result.auc == pytest.approx(0.75)
    assert result.true_rate == pytest.approx(0.5)
    equal = by_loss(torch.ones(50), torch.ones(50))
    assert (equal.auc, equal.true_rate) == (0.5, 0.0)


def test_an_area_counts_pairs_and_does_not_care_for_the_sign() -> None:
    # class 0: scores 3, 1 against 2, 0: three of four pairs; class 1 the wrong way round: also 3/4
    scores = torch.tensor([[3.0, 3.0], [1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    assert auc(scores, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.75)
    lengths = by_norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), classes=3)
    assert lengths.tolist() == [[5.0] * 3, [1.0] * 3]


def test_gradients_are_those_of_the_printed_formula() -> None:
    """(softmax - onehot) / B by logits; by embeddings the same, times the last layer's weights."""
    net = build("tiny", seed=0)
    inputs = torch.rand(8, *net.input_shape, generator=torch.Generator().manual_seed(1)) * 16
    labels = torch.arange(8)
    by_logits, by_embeddings = gradients(net, inputs, labels)
    with torch.no_grad():
        expected = (torch.softmax(net(inputs), 1) - torch.eye(10)[labels]) / 8
    torch.testing.assert_close(by_logits, expected, rtol=1e-4, atol=1e-7)
    weight = net.segment(0, None).classifier.weight.detach()
    torch.testing.assert_close(by_embeddings, expected @ weight, rtol=1e-4, atol=1e-7)


def test_what_is_sent_is_coded_clipped_and_noised() -> None:
    net = build("tiny", seed=0).eval()
    x = torch.rand(4, *net.input_shape, generator=torch.Generator().manual_seed(1)) * 16
    plain = Sent(net.prefix(2), "fp32")(x)
    with torch.no_grad():
        assert torch.equal(plain, net.prefix(2)(x))
    spans = plain.flatten(1).amax(1).clamp(min=0) - plain.flatten(1).amin(1).clamp(max=0)
    coded = Sent(net.prefix(2), "int8")(x)
    steps = (spans / 255)[:, None, None, None]
    assert ((coded - plain).abs() <= 0.51 * steps).all()
    noised = Sent(net.prefix(2), "fp32", sigma=0.05, seed=3)(x)
    # the noise alone: what is clipped has norm 10 at most, each entry a deviation of 0.5
    clipped = plain * (CLIP / plain.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None, None]
    assert float((noised - clipped).std()) == pytest.approx(0.05 * CLIP, rel=0.1)


def test_a_report_has_means_spreads_and_reasons(tmp_path: Path) -> None:
    found = {"accuracy": 0.8, "epsilon": 2_000.0, "auc": 0.6, "true_rate": 0.02}
    nothing = dict.fromkeys(found)
    trials = [
        Trial("members", "FedAvg", 0, found),
        Trial("members", "FedAvg", 1, found | {"accuracy": 0.6}),
        Trial("members", "SuperSFL", 0, nothing, why="losses leave without noise"),
    ]
    about = dict.fromkeys(("command", "splitedge", "torch", "threads", "machine", "when"), "x")
    world = World("digits", SCALES["digits"], 0)
    write_report(tmp_path / "p", about | {"commit": "c"}, world, trials, Pictures())
    text = (tmp_path / "p.md").read_text()
    # of 80 and 60: mean 70, deviation sqrt(2 * 10^2 / 1) = 14.1
    assert "| FedAvg | 70.0 ± 14.1 | 2,000 ± 0 | 0.600 ± 0.000 | 2.0 ± 0.0 |" in text
    assert "| SuperSFL | none | none | none | none |" in text
    assert "SuperSFL: losses leave without noise." in text
    assert not (tmp_path / "p.png").exists()


def test_every_attack_runs_and_its_figures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(
        SCALES["digits"],
        rounds=1,
        train_max=100,
        test_max=60,
        members=60,
        member_rounds=1,
        attacked=30,
        inverter=Attacker(8, 0, epochs=1),
    )
    monkeypatch.setitem(SCALES, "digits", small)
    privacy("digits", results=tmp_path)
    written = orjson.loads((tmp_path / "privacy-digits.json").read_bytes())
    names: dict[str, set[str]] = {part: set() for part in ("images", "labels", "members")}
    for trial in written["trials"]:
        names[trial["part"]].add(trial["name"])
    cuts = build("tiny", seed=0).cuts
    assert {f"depth {cut}, {codec}" for cut in cuts for codec in ("fp32", "fp16", "int8")} < names[
        "images"
    ]
    assert len(names["images"]) == 3 * len(cuts) + 4
    assert len(names["labels"]) == 16
    assert {"FedAvg", "SplitFedV1", "SuperSFL, exit 2"} < names["members"]
    refused = next(t for t in written["trials"] if t["name"].startswith("SuperSFL, noise"))
    assert refused["figures"]["epsilon"] is None
    assert "supersfl" in refused["why"]
    noised = next(t for t in written["trials"] if t["name"].startswith("FedAvg, noise 0.2"))
    assert noised["figures"]["epsilon"] > 0
    assert (tmp_path / "privacy-digits.png").stat().st_size > 1_000
    with pytest.raises(typer.BadParameter, match="expected some of images, labels, members"):
        privacy("digits", parts=["pixels"], results=tmp_path)
