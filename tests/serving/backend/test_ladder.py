"""The ladder engine against torch: at any mix of depths, each query gets its own answer."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from server.backend import joined
from server.backend.ladder import Entry, LadderEngine, padded
from server.errors import BadRequestError

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

# onnxruntime and torch add in different orders: float32, sums of up to 288 products, logits of
# magnitude 10. An answer for another sample would be off by more than 1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["joined", "one by one"])
def engine(exported: Exported, request: pytest.FixtureRequest) -> LadderEngine:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "one by one":
            patch.setattr(joined, "JOINED_BYTES", 0)  # as for a large model
        return LadderEngine(exported.folder, exported.manifest)


def test_mixed_depths_are_answered_as_torch_answers_each(
    engine: LadderEngine, exported: Exported
) -> None:
    depths = [0, 0, 0, 1, 1, 2, 2, 2, 4, 4, 4, 4]
    random.Random(1).shuffle(depths)
    rows = [1, 3, 2, 5, 1, 1, 4, 2, 1, 1, 2, 3]
    entries, expected, at = [], [], 0
    for depth, count in zip(depths, rows, strict=True):
        x = exported.x[at : at + count]
        at += count
        z = exported.smashed(depth, x)
        entries.append(Entry(depth, z))
        expected.append(exported.suffix(depth, z))

    answers = engine.run(entries)

    for answer, logits in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer, logits, atol=TOLERANCE, rtol=0)


def test_the_order_of_the_queries_is_kept(engine: LadderEngine, exported: Exported) -> None:
    samples = exported.x[:8]
    deepest_first = [4, 2, 1, 0, 4, 2, 1, 0]
    entries = [
        Entry(depth, exported.smashed(depth, samples[i : i + 1]))
        for i, depth in enumerate(deepest_first)
    ]

    answers = np.concatenate(engine.run(entries))

    np.testing.assert_allclose(answers, exported.logits(samples), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_single_query_runs_the_suffix_of_its_depth(
    engine: LadderEngine, exported: Exported, depth: int
) -> None:
    z = exported.smashed(depth, exported.x[40:41])

    (answer,) = engine.run([Entry(depth, z)])

    assert answer.shape == (1, 10)
    np.testing.assert_allclose(answer, exported.suffix(depth, z), atol=TOLERANCE, rtol=0)


def test_a_batch_that_is_padded_answers_its_own_rows_only(
    engine: LadderEngine, exported: Exported
) -> None:
    for rows in (17, 19, 31, 33):  # run as 18, 20, 32, 36
        (answer,) = engine.run([Entry(0, exported.x[:rows])])
        expected = exported.logits(exported.x[:rows])
        np.testing.assert_allclose(answer, expected, atol=TOLERANCE, rtol=0)


def test_batches_run_at_eight_sizes_between_powers_of_two() -> None:
    expected = {rows: rows for rows in range(1, 17)}
    expected |= {17: 18, 18: 18, 19: 20, 31: 32, 32: 32, 33: 36, 36: 36, 61: 64, 64: 64, 65: 72}
    expected |= {97: 104, 129: 144, 200: 208, 256: 256}
    assert {rows: padded(rows) for rows in expected} == expected


def test_little_of_a_batch_is_padding() -> None:
    # the worst case is one row more than a power of two: 2^k + 1 rows run as 9/8 * 2^k
    assert all(rows <= padded(rows) < 1.125 * rows for rows in range(1, 257))
    assert len({padded(rows) for rows in range(1, 257)}) == 48  # 16, and 8 up to each of 32 to 256


def refusal(engine: LadderEngine, depth: int, array: NDArray[Any]) -> str:
    with pytest.raises(BadRequestError) as refused:
        engine.check(Entry(depth, array))
    return str(refused.value)


def test_what_cannot_climb_is_refused_with_expected_and_got(engine: LadderEngine) -> None:
    z2 = np.zeros((1, 16, 4, 4), np.float32)
    engine.check(Entry(2, z2))

    assert re.search(r"z3.*x, z1, z2, z4", refusal(engine, 3, z2))
    assert re.search(r"\[n, 16, 4, 4\].*\[1, 16, 4\]", refusal(engine, 2, z2[0][None, ..., 0]))
    assert re.search(r"\[n, 16, 4, 4\].*\[\]", refusal(engine, 2, np.zeros((), np.float32)))
    assert re.search(r"float32.*float64", refusal(engine, 2, z2.astype(np.float64)))
    assert re.search(r"uint8.*float32", refusal(engine, 0, np.zeros((1, 1, 8, 8), np.float32)))


def test_every_weight_of_the_suffixes_is_held_once(exported: Exported) -> None:
    held = 0
    for segment in exported.manifest.segments:
        graph = onnx.load(str(exported.folder / "segments" / segment.file)).graph
        held += sum(
            int(np.prod(initialiser.dims))
            for initialiser in graph.initializer
            if initialiser.data_type == onnx.TensorProto.FLOAT and initialiser.dims
        )
    net = exported.net
    parts = (net.stages, net.head)
    weights = sum(p.numel() for part in parts for p in part.parameters())
    assert weights <= held <= weights + 16  # and the constants of preprocessing
