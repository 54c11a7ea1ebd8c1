"""The rule of the parts: complete, without overlap, by class and by group, the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.dataset import labelled_dataset
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.data.samples import Part, Samples
from edge_sdk.training.data.split import Parts, split_samples

Ints = NDArray[np.int64]


def numbered(count: int, y: Ints | None = None, **more: Ints) -> Samples:
    """Samples whose only value is their number."""
    return Samples("numbers", Part(np.arange(count, dtype=np.float32)[:, None], y, **more))


def numbers(part: Part) -> list[int]:
    return [int(value) for value in part.x[:, 0]]


def everything(parts: Parts) -> list[int]:
    return sorted(numbers(parts.train) + numbers(parts.held_out) + numbers(parts.test))


@given(
    count=st.integers(3, 60),
    classes=st.integers(0, 5),
    groups=st.integers(0, 4),
    runs=st.integers(0, 9),
    held_out=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    seed=st.integers(0, 3),
)
def test_parts_share_no_sample_lose_none_and_are_not_empty(
    count: int, classes: int, groups: int, runs: int, held_out: float, seed: int
) -> None:
    row = np.arange(count)
    more = {"groups": row % groups} if groups else {}
    more |= {"runs": row // runs} if runs else {}
    samples = numbered(count, row % classes if classes else None, **more)
    parts = split_samples(samples, held_out=held_out, seed=seed)
    assert everything(parts) == list(range(count))
    assert len(parts.train)
    assert len(parts.test)
    assert bool(len(parts.held_out)) == (held_out > 0)


def test_shares_are_a_fifth_for_test_and_a_tenth_of_the_rest_held_out() -> None:
    assert split_samples(numbered(1000)).sizes == {"train": 720, "held_out": 80, "test": 200}


def test_each_class_gives_its_share() -> None:
    y = np.repeat([0, 1, 2], [100, 50, 10])
    parts = split_samples(numbered(160, y))
    assert parts.test.y is not None
    assert parts.held_out.y is not None
    assert np.bincount(parts.test.y).tolist() == [20, 10, 2]
    # 0.1 of 80, 40 and 8 rows: 12.8, so 13 rows; the class of 8 rows has the largest remainder
    assert np.bincount(parts.held_out.y).tolist() == [8, 4, 1]


def test_class_of_one_sample_stays_in_training() -> None:
    parts = split_samples(numbered(41, np.repeat([0, 1], [40, 1])), held_out=0.5)
    assert parts.train.y is not None
    assert (parts.train.y == 1).sum() == 1


def test_labels_stay_with_their_samples() -> None:
    parts = split_samples(numbered(60, np.arange(60) % 3))
    for part in (parts.train, parts.held_out, parts.test):
        assert part.y is not None
        np.testing.assert_array_equal(part.x[:, 0] % 3, part.y)


def test_split_is_the_seeds() -> None:
    first, again, other = (split_samples(numbered(50), seed=seed) for seed in (1, 1, 2))
    assert numbers(first.test) == numbers(again.test)
    assert numbers(first.held_out) == numbers(again.held_out)
    assert numbers(first.test) != numbers(other.test)


def test_own_test_part_is_left_whole() -> None:
    own = Part(-np.ones((7, 1), np.float32))
    samples = Samples("numbers", numbered(100).train, own)
    parts = split_samples(samples)
    assert parts.test is own
    assert parts.sizes == {"train": 90, "held_out": 10, "test": 7}


def test_no_more_samples_than_asked_for_are_kept() -> None:
    own = Part(-np.ones((7, 1), np.float32))
    parts = split_samples(Samples("numbers", numbered(100).train, own), most=50)
    assert parts.sizes == {"train": 45, "held_out": 5, "test": 7}


def test_nobodys_samples_are_in_two_parts() -> None:
    groups = np.arange(300) % 20
    parts = split_samples(numbered(300, np.arange(300) % 6, groups=groups))
    people = [
        set(part.groups.tolist())
        for part in (parts.train, parts.held_out, parts.test)
        if part.groups is not None
    ]
    assert [len(each) for each in people] == [14, 2, 4]  # a fifth of 20, a tenth of 16
    assert len(set.union(*people)) == 20


def test_runs_stay_whole_and_each_class_gives_some() -> None:
    runs = np.arange(400) // 10
    y = (runs % 4).astype(np.int64)
    parts = split_samples(numbered(400, y, runs=runs))
    assert parts.test.y is not None
    assert np.bincount(parts.test.y).tolist() == [20, 20, 20, 20]
    own = [
        {number // 10 for number in numbers(part)}
        for part in (parts.train, parts.held_out, parts.test)
    ]
    assert sum(map(len, own)) == 40  # no run is in two of them


def test_one_person_alone_gives_the_last_samples_of_each_class() -> None:
    samples = numbered(40, np.repeat([0, 1], 20), groups=np.zeros(40, np.int64))
    parts = split_samples(samples)
    assert numbers(parts.test) == [16, 17, 18, 19, 36, 37, 38, 39]
    assert numbers(parts.held_out) == [14, 15, 35]


def test_two_people_are_parted_and_the_rest_by_time() -> None:
    parts = split_samples(numbered(30, groups=np.repeat([7, 8], [20, 10])))
    assert numbers(parts.test) == list(range(20, 30))  # the smaller of the two
    assert numbers(parts.held_out) == [18, 19]


@pytest.mark.parametrize(("count", "needed"), [(2, 3), (1, 3)])
def test_too_few_samples(count: int, needed: int) -> None:
    with pytest.raises(InputError, match=f"expected at least {needed} samples, one for each part"):
        split_samples(numbered(count))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_share_that_is_none(share: float) -> None:
    with pytest.raises(ConfigurationError, match="held_out: expected a finite number"):
        split_samples(numbered(20), held_out=share)


def test_dataset_has_what_the_split_gives() -> None:
    whole, parted = load_dataset("digits"), load_dataset("digits", held_out=0.1)
    assert whole.sizes == {"train": 1438, "held_out": 0, "test": 359}
    assert parted.sizes == {"train": 1294, "held_out": 144, "test": 359}
    both = np.concatenate([parted.x_train, parted.x_held_out])
    assert sorted(map(bytes, both)) == sorted(map(bytes, whole.x_train))
    np.testing.assert_array_equal(parted.x_test, whole.x_test)
    np.testing.assert_allclose(parted.mean, [parted.x_train.mean(dtype=np.float64)])


def test_held_out_people_are_the_datasets() -> None:
    groups = np.arange(60) % 10
    samples = numbered(60, np.arange(60) % 2, groups=groups)
    data = labelled_dataset(samples, held_out=0.2)
    assert data.group_train is not None
    assert data.group_held_out is not None
    assert not set(data.group_train) & set(data.group_held_out)
