"""The file of a learnt head, whole and damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_sdk.learning.head import Head
from edge_sdk.learning.kept_head import FILE, load_head, save_head
from edge_sdk.learning.personalise import Personalisation, Sample
from tests.damage import ZIP_ENTRY, flipped


def personalisation() -> Personalisation:
    """Of a head of one feature and two classes."""
    return Personalisation(Head(np.ones((2, 1), np.float32), np.zeros(2, np.float32)))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder with the head and two samples that were learnt."""
    own = personalisation()
    for _ in range(2):
        own.learnt.append(Sample(np.ones(1, np.float32), np.array([1, 0], np.float32)))
    save_head(tmp_path, "digits", own)
    return tmp_path


def test_a_head_that_was_kept_is_loaded_for_its_bundle_alone(state: Path) -> None:
    own = personalisation()
    assert not load_head(state, "other", own)
    assert load_head(state, "digits", own)
    assert len(own.learnt) == 2


def test_whichever_bit_is_damaged_learning_starts_anew_or_goes_on(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (state / FILE).read_bytes()
    loaded = []
    first = whole.index(ZIP_ENTRY)
    for damaged in flipped(whole, first, whole.index(ZIP_ENTRY, first + 1)):
        (state / FILE).write_bytes(damaged)
        loaded.append(load_head(state, "digits", personalisation()))
    assert any(loaded)  # a bit of a time stamp
    assert not all(loaded)
    for why in ("encrypted", "zip file version"):
        assert why in caplog.text


@pytest.mark.parametrize("part", [30, 300, -200, -1])
def test_a_head_that_was_cut_off_counts_as_none(part: int, state: Path) -> None:
    whole = (state / FILE).read_bytes()
    (state / FILE).write_bytes(whole[:part])
    assert not load_head(state, "digits", personalisation())
