"""Labels of a device by the names of the training's classes."""

from __future__ import annotations

import logging

import pytest

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.data.class_numbers import class_numbers

FLEET = ("ant", "bee", "cow", "dog")


@pytest.mark.parametrize(
    ("own", "trained", "expected"),
    [
        (("dog",), FLEET, (3,)),
        (("cow", "bee"), FLEET, (2, 1)),
        (FLEET, FLEET, (0, 1, 2, 3)),
        # data that name no classes have their numbers as names
        (("0", "1", "2"), FLEET, (0, 1, 2)),
        (("3", "7"), tuple(map(str, range(10))), (3, 7)),
        (("00", "03"), FLEET, (0, 3)),
        # numbers are names too, where the training has them
        (("3", "7"), ("7", "3"), (1, 0)),
        # a trainer of an earlier release tells no names
        (("bee", "gnu"), (), (0, 1)),
    ],
)
def test_labels_follow_the_names(
    own: tuple[str, ...],
    trained: tuple[str, ...],
    expected: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert class_numbers(own, trained) == expected
    assert not caplog.records


def test_names_that_the_training_cannot_know_count_in_their_order_and_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert class_numbers(("bee", "gnu"), ("0", "1", "2")) == (0, 1)
    assert "the training names no classes" in caplog.text
    assert "0 bee, 1 gnu" in caplog.text


@pytest.mark.parametrize(
    ("own", "named"), [(("bee", "gnu"), "gnu"), (("2", "4"), "2, 4"), (("1", "gnu"), "1, gnu")]
)
def test_unknown_names_are_refused_and_named(own: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the classes {named}, which this training"):
        class_numbers(own, FLEET)
