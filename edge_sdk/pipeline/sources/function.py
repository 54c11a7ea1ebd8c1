"""The source `module:function`: a user's own function that gives arrays, or names and arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.pipeline.samples import samples_of
from edge_sdk.pipeline.sources.feed import Feed, Item


class FunctionSource:
    """Items of the iterator that the function returns. The source ends with it.

    Args:
        function: without arguments. Its iterator runs in a thread of the stream.
        word: the function's name, for people.
    """

    newest = False
    patient = True

    def __init__(self, function: Callable[[], Any], word: str) -> None:
        self._function = function
        self._word = word

    def items(self, feed: Feed) -> Iterator[Item]:
        """The arrays as samples. One of a wrong shape is named, counted and left out.

        Raises: ConfigurationError if the function returns nothing to iterate over; what the
            function raises.
        """
        result = self._function()
        try:
            iterator = iter(result)
        except TypeError as err:
            raise ConfigurationError(
                f"source {self._word}: expected an iterator of arrays or of (name, array), got"
                f" {type(result).__name__}; use yield"
            ) from err
        for number, value in enumerate(iterator, 1):
            if feed.stopped:
                return
            named = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
            name, array = value if named else (f"{self._word} {number}", value)
            try:
                samples = list(samples_of(name, np.asarray(array), feed.spec()))
            except InputError as err:
                feed.refuse(str(err))
                continue
            except ValueError as err:  # lists of unequal length
                feed.refuse(f"{name}: expected an array ({err})")
                continue
            for each, sample in samples:
                yield Item(each, sample)

    def answered(self, mark: object) -> None:
        """Nothing to remember."""

    def close(self) -> None:
        """The function's iterator is its own."""
