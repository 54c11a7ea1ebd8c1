"""The rule that parts samples into train, held-out and test.

test        the data's own test part, else a fifth of all samples
held-out    a tenth of what is left: it chooses thresholds, calibrations and stopping points
train       the rest

Each class gives the same share. Samples of one person, or of one stretch of a recording, stay
together: neighbours in a recording are alike, so a score on the one would say nothing about the
other. The seed is of the split alone and 0 by default, so a source of data has the same three parts
in every command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.checks import check_value
from edge_sdk.errors import InputError
from edge_sdk.training.data.samples import Array, Part, Samples
from profiles.checks import number

SEED: Final = 0
TEST_SHARE: Final = 0.2
HELD_OUT_SHARE: Final = 0.1
# keep the draws apart from other draws of the same seed, and from each other
_TEST_STREAM: Final = 0x5350
_HELD_OUT_STREAM: Final = 0x5351

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parts:
    """Samples after the split; no sample is in two parts."""

    train: Part
    held_out: Part
    test: Part

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each part, by `train`, `held_out`, `test`."""
        return {"train": len(self.train), "held_out": len(self.held_out), "test": len(self.test)}


def split_samples(
    samples: Samples,
    *,
    held_out: float = HELD_OUT_SHARE,
    seed: int = SEED,
    most: int | None = None,
) -> Parts:
    """The three parts.

    Args:
        held_out: share of the samples that are not for test; with 0 the held-out part is empty.
        most: samples of train and held-out part together; left out at random.
    Raises: InputError where there are too few samples to part; ConfigurationError for a share
        below 0, or of 1 and more.
    """
    check_value("held_out", held_out, number(least=0, below=1))
    train, test = samples.train, samples.test
    needed = 1 + (test is None) + (held_out > 0)
    if len(train) < needed:
        raise InputError(
            f"{samples.name}: expected at least {needed} samples, one for each part, got"
            f" {len(train)}"
        )
    if test is None:
        rows = draw_rows(train, TEST_SHARE, np.random.default_rng([seed, _TEST_STREAM]))
        test, train = train.rows(rows), train.rows(_others(rows, len(train)))
    random = np.random.default_rng([seed, _HELD_OUT_STREAM])
    if not held_out:
        return Parts(_at_most(train, most, random), train.rows(slice(0, 0)), test)
    rows = draw_rows(train, held_out, random)
    chooses, train = train.rows(rows), train.rows(_others(rows, len(train)))
    if most is not None:
        kept = max(1, round(held_out * most))
        chooses, most = _at_most(chooses, kept, random), most - min(kept, len(chooses))
    return Parts(_at_most(train, most, random), chooses, test)


def draw_rows(part: Part, share: float, random: np.random.Generator) -> Rows:
    """Rows of about that share of a part, ascending: at least one, and never all.

    Whole groups where there are at least two, else whole runs; with neither single rows. Each class
    gives its share, as far as whole units allow.

    Args:
        part: two samples or more.
        share: above 0, below 1.
    """
    for units in (part.groups, part.runs):
        if units is not None and len(np.unique(units)) > 1:
            return _draw_units(units, part.y, share, random)
    labels = np.zeros(len(part), np.int64) if part.y is None else part.y
    if part.groups is not None or part.runs is not None:
        return _last_rows(labels, share)
    return _draw_single(labels, share, random)


def _draw_single(labels: Array, share: float, random: np.random.Generator) -> Rows:
    """Rows drawn class by class."""
    classes = [random.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    quotas = _quotas([len(rows) for rows in classes], share)
    return np.sort(np.concatenate([rows[:q] for rows, q in zip(classes, quotas, strict=True)]))


def _last_rows(labels: Array, share: float) -> Rows:
    """The last rows of each class: of one recording they are the ones apart from the others."""
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    quotas = _quotas([len(rows) for rows in classes], share)
    last = [rows[len(rows) - q :] for rows, q in zip(classes, quotas, strict=True)]
    return np.sort(np.concatenate(last))


def _quotas(counts: list[int], share: float) -> list[int]:
    """Rows to take of each class: round(share * n) together, by largest remainders.

    A class with one row keeps it, unless all classes have only one.
    """
    total = min(max(1, round(share * sum(counts))), sum(counts) - 1)
    limits = [count - 1 for count in counts] if max(counts) > 1 else counts
    exact = [share * count for count in counts]
    quotas = [min(int(value), limit) for value, limit in zip(exact, limits, strict=True)]
    by_remainder = sorted(range(len(counts)), key=lambda c: quotas[c] - exact[c])
    while sum(quotas) < total:
        open_ = [c for c in by_remainder if quotas[c] < limits[c]]
        if not open_:
            break
        for c in open_[: total - sum(quotas)]:
            quotas[c] += 1
    return quotas


def _draw_units(
    units: Array, labels: Array | None, share: float, random: np.random.Generator
) -> Rows:
    """Rows of whole units, taken in random order while they bring the classes nearer to the share.

    The distance is the sum over classes of |taken - share * all|.
    """
    names, unit_of = np.unique(units, return_inverse=True)
    classes, class_of = np.unique(
        np.zeros(len(units), np.int64) if labels is None else labels, return_inverse=True
    )
    counts = np.zeros((len(names), len(classes)), np.int64)
    np.add.at(counts, (unit_of, class_of), 1)
    missing = share * counts.sum(axis=0)
    taken: list[int] = []
    order = random.permutation(len(names))
    for unit in order[:-1]:  # one unit is left in any case
        if np.abs(missing - counts[unit]).sum() < np.abs(missing).sum():
            taken.append(int(unit))
            missing = missing - counts[unit]
    if not taken:  # every unit is larger than the share of all
        taken = [int(order[counts[order].sum(axis=1).argmin()])]
    return np.flatnonzero(np.isin(unit_of, taken)).astype(np.int64)


def _at_most(part: Part, most: int | None, random: np.random.Generator) -> Part:
    if most is None or len(part) <= most:
        return part
    return part.rows(np.sort(random.permutation(len(part))[:most]))


def _others(rows: Rows, total: int) -> Rows:
    left = np.ones(total, np.bool_)
    left[rows] = False
    return np.flatnonzero(left).astype(np.int64)
