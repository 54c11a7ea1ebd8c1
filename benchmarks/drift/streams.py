"""Pictures of Fashion-MNIST as a device may see them after something has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Pictures = NDArray[np.uint8]
Change = Callable[[Pictures], Pictures]

_NEIGHBOURS: Final = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))


def unchanged(x: Pictures) -> Pictures:
    """The pictures as they are."""
    return x


def inverted(x: Pictures) -> Pictures:
    """Light and dark swapped."""
    return 255 - x


def blurred(x: Pictures) -> Pictures:
    """Out of focus: each pixel the mean of itself and its four neighbours, three times over."""
    soft: NDArray[Any] = x.astype(np.float32)
    for _ in range(3):
        soft = np.mean([np.roll(soft, move, axis=(-2, -1)) for move in _NEIGHBOURS], axis=0)
    return soft.astype(np.uint8)


def noisy(x: Pictures) -> Pictures:
    """Grainy: normal noise of a tenth of the range."""
    grain = np.random.default_rng(1).normal(0.0, 25.5, x.shape)
    return np.clip(x + grain, 0, 255).astype(np.uint8)


def dim(x: Pictures) -> Pictures:
    """In half the light."""
    return x // 2


def moved(x: Pictures) -> Pictures:
    """Four pixels to the side, as after a knock at the camera."""
    return np.roll(x, 4, axis=-1)


def turned(x: Pictures) -> Pictures:
    """A quarter of a turn."""
    return np.ascontiguousarray(np.rot90(x, axes=(-2, -1)))


CHANGES: Final[Mapping[str, Change]] = {
    "none": unchanged,
    "half the light": dim,
    "out of focus": blurred,
    "noise": noisy,
    "four pixels aside": moved,
    "a quarter turn": turned,
    "light and dark swapped": inverted,
}
