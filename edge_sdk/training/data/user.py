"""A user's own Python function as a data set: `module:function` -> (x, y, x, y)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge_sdk.errors import ConfigurationError, InputError
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
    """Result of a user's `module:function`.

    The function is called without arguments. Its module is searched where Python searches, then in
    `folder` (the current one if None): an installed module wins, so a user's `server.py` hides
    nothing. Errors of the function itself reach the caller with their traceback.

    Raises: ConfigurationError if there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    place = folder if folder is not None else Path.cwd()
    with _also_from(place):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as err:
            if err.name is None or not f"{module_name}.".startswith(f"{err.name}."):
                raise  # the module exists, but something that it imports does not
            raise ConfigurationError(
                f"data {name!r}: expected a module {module_name}; put {module_name}.py in {place}"
            ) from err
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ConfigurationError(
                f"data {name!r}: expected a function {function_name} in"
                f" {getattr(module, '__file__', module_name)}, found none"
            )
        result: object = function()
    return result


@contextmanager
def _also_from(folder: Path) -> Iterator[None]:
    """Import from `folder` too, after all other places."""
    entry = str(folder.resolve())
    importlib.invalidate_caches()  # the file may be younger than Python's last look at the folder
    sys.path.append(entry)
    try:
        yield
    finally:
        for place in range(len(sys.path) - 1, -1, -1):
            if sys.path[place] == entry:
                del sys.path[place]
                break
