"""Whether two pictures show the same, and two reports have the same numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np


def same_picture(one: bytes, other: bytes) -> bool:
    """Whether two pictures show the same, but for the last digits of another processor."""
    texts, numbers = zip(*map(parted, (one, other)), strict=True)
    same = texts[0] == texts[1] and len(numbers[0]) == len(numbers[1])
    return same and np.allclose(numbers[0], numbers[1], atol=0.01)


def parted(picture: bytes) -> tuple[list[str], list[float]]:
    """The words and the numbers of a picture, without ids, which are made of the numbers."""
    text = re.sub(r"\b[a-z][0-9a-f]{10}\b", "id", picture.decode())
    parts = re.split(r"(-?\d+\.?\d*(?:e-?\d+)?)", text)
    return parts[::2], [float(number) for number in parts[1::2]]


def numbers(value: Any) -> list[float]:
    """All numbers of nested dictionaries, in the order of their keys."""
    if isinstance(value, dict):
        return [each for key in sorted(value) for each in numbers(value[key])]
    return [float(value)] if isinstance(value, int | float) else []
