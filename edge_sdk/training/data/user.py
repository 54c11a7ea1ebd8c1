"""A user's own Python function as a data set: `module:function` -> (x, y, x, y)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_sdk.errors import InputError
from edge_sdk.installation import user_function
from edge_sdk.training.data.dataset import Dataset, Part, make_dataset


def from_function(name: str, folder: Path | None) -> Dataset:
    """The data set that a user's function returns as x_train, y_train, x_test, y_test.

    Raises: as `call_function`; InputError if the function returns something that is no data set.
    """
    result = call_function(name, folder)
    if not isinstance(result, tuple | list) or len(result) != 4:
        raise InputError(
            f"data {name!r}: expected four arrays, x_train, y_train, x_test, y_test,"
            f" got {type(result).__name__}"
            + (f" of {len(result)}" if isinstance(result, tuple | list) else "")
        )
    x_train, y_train, x_test, y_test = (np.asarray(entry) for entry in result)
    return make_dataset(name, Part(x_train, y_train), Part(x_test, y_test), source=f"data {name!r}")


def call_function(name: str, folder: Path | None) -> object:
    """Result of a user's `module:function`, called without arguments.

    Args:
        folder: searched for the module (edge_sdk.installation); the current one if None.
    Raises: ConfigurationError if there is no such module or function.
    """
    return user_function(name, () if folder is None else (folder,), what="data")()
