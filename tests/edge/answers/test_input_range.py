"""Inputs of another scale than the bundle's samples are told, once."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from edge_sdk.agent import EdgeAgent
from edge_sdk.answers.input_range import FIRST, InputRange, range_of
from tests.edge.digits import Digits
from tests.edge.fleet import Fleet


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "edge_sdk.answers.input_range")
    return caplog


def test_pixels_to_255_in_place_of_16_are_told_once(
    fleet: Fleet, digits: Digits, warned: pytest.LogCaptureFixture
) -> None:
    state = fleet.device("scaled")
    right = digits.x[:30]
    with EdgeAgent.open(state) as agent:
        for x in right:
            agent.predict(x, local=True)
        assert warned.text == ""
        for x in right:
            agent.predict((x * np.float32(255 / 16)).astype(np.float32), local=True)
    assert warned.text.count("inputs have values up to 255") == 1
    assert "its own samples up to 16: scale the inputs" in warned.text


def test_values_that_stay_too_small_are_told_after_a_while(
    warned: pytest.LogCaptureFixture,
) -> None:
    known = InputRange("digits/1/d1", largest=255.0, energy=255.0**2 * 64)
    dark = np.zeros((1, 8, 8), np.float32)
    small = np.full((1, 8, 8), 1.0, np.float32)
    for _ in range(100):
        known.look(dark)  # a lens cap is no wrong scale
    for _ in range(FIRST - 1):
        known.look(small)
    assert warned.text == ""
    assert known.young
    known.look(small)
    assert "inputs have values up to 1, its own samples up to 255" in warned.text
    assert not known.young


def test_one_bright_input_shows_that_the_scale_is_right(warned: pytest.LogCaptureFixture) -> None:
    known = InputRange("digits/1/d1", largest=255.0, energy=255.0**2 * 64)
    known.look(np.full((1, 8, 8), 200.0, np.float32))
    for _ in range(100):
        known.look(np.full((1, 8, 8), 1.0, np.float32))
    known.look(np.full((1, 8, 8), 600.0, np.float32))  # a sensor reaches more than in the samples
    assert warned.text == ""


def test_samples_of_zeros_say_nothing() -> None:
    assert range_of("digits/1/d1", np.zeros((3, 1, 8, 8), np.float32)) is None
