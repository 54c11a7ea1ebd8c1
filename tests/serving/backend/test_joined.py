"""Segments joined into one graph: the same answers, for small models alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import version_converter

from edge_sdk.session import Session
from server.backend import joined
from server.backend.joined import joined_suffixes
from server.backend.ladder import Entry, LadderEngine

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


def test_a_joined_graph_gives_what_its_segments_give(exported: Exported) -> None:
    graphs = joined_suffixes(exported.folder, exported.manifest)
    assert sorted(graphs) == [0, 1, 2]  # the deepest entry, 4, has one segment
    for entry, graph in graphs.items():
        array = exported.smashed(entry, exported.x[:8])
        session = Session(Path(f"from-{entry}"), content=graph)
        (given,) = session.inputs
        (logits,) = session.run(None, {given: array})
        for segment in exported.manifest.segments:
            if segment.entry >= entry:
                one = Session(exported.folder / "segments" / segment.file)
                (array,) = one.run(None, {next(iter(one.inputs)): array})
        # the same operators in the same order; onnxruntime may add in another one
        np.testing.assert_allclose(logits, array, rtol=1e-5, atol=1e-5)


def test_joined_graphs_are_made_while_they_are_small_together(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(map(len, joined_suffixes(exported.folder, exported.manifest).values()))
    # names of nodes get a prefix, and a file has a head: a few per cent
    monkeypatch.setattr(joined, "JOINED_BYTES", int(1.1 * total))
    assert joined_suffixes(exported.folder, exported.manifest)
    monkeypatch.setattr(joined, "JOINED_BYTES", int(0.9 * total))
    assert joined_suffixes(exported.folder, exported.manifest) == {}


def test_segments_of_unlike_operators_run_one_by_one(exported: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported.folder, folder)
    file = folder / "segments" / exported.manifest.segments[-1].file
    model = onnx.load(file)
    newest = next(entry.version for entry in model.opset_import if not entry.domain)
    onnx.save(version_converter.convert_version(model, newest + 1), file)

    assert joined_suffixes(folder, exported.manifest) == {}

    (answer,) = LadderEngine(folder, exported.manifest).run([Entry(0, exported.x[:4])])
    np.testing.assert_allclose(answer, exported.logits(exported.x[:4]), atol=1e-4, rtol=0)
