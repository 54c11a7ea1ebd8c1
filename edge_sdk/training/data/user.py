"""A user's own Python function as a source of data: `module:function`, called without arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_sdk.errors import InputError
from edge_sdk.installation import user_function
from edge_sdk.training.data.samples import Part, Samples, checked_samples


def from_function(name: str, folder: Path | None = None) -> Samples:
    """The samples that a user's function returns as x_train, y_train, x_test, y_test.

    It may return the first two only, or the first; y_train, x_test and y_test may be None.

    Args:
        folder: searched for the module (edge_sdk.installation); the current one if None.
    Raises: ConfigurationError if there is no such module or function; InputError if the function
        returns something else.
    """
    result = user_function(name, () if folder is None else (folder,), what="data")()
    if not isinstance(result, tuple | list) or len(result) not in (1, 2, 4) or result[0] is None:
        raise InputError(
            f"data {name!r}: expected x_train, y_train, x_test, y_test (or the first two, or the"
            f" first), got {type(result).__name__}"
            + (f" of {len(result)}" if isinstance(result, tuple | list) else "")
        )
    arrays = [None if entry is None else np.asarray(entry) for entry in result]
    x_train, y_train, x_test, y_test = (*arrays, None, None, None)[:4]
    assert x_train is not None
    test = None if x_test is None else Part(x_test, y_test)
    return checked_samples(name, Part(x_train, y_train), test, source=f"data {name!r}")
