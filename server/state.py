"""The state folder of a server, told apart from a device's and from a folder that is none."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_sdk.errors import ConfigurationError
from edge_sdk.identity import IDENTITY_NAME
from server.registry.database import Registry, open_registry
from server.registry.location import has_registry
from server.registry.transactions import acting_from


@contextmanager
def existing_registry(state: Path) -> Iterator[Registry]:
    """The registry of the server with this state folder, until the end of the block.

    Raises: ConfigurationError if no server has run there; RegistryError.
    """
    check_server_state(state)
    registry = open_registry(state)
    try:
        with acting_from(f"{getpass.getuser()} on this machine"):
            yield registry
    finally:
        registry.close()


def check_server_state(state: Path) -> None:
    """Check that a server has run on `state`, before anything is written.

    Raises: ConfigurationError.
    """
    check_not_a_device(state)
    if not has_registry(state):
        raise ConfigurationError(f"{state}: not the state folder of a server; check --state")


def check_server_or_models(state: Path) -> bool:
    """Check that a server has run on `state`, or that it is prepared for one, with models in it.

    So a folder that was mistyped is told, and not made.

    Returns: whether a server has run there.
    Raises: ConfigurationError.
    """
    check_not_a_device(state)
    if has_registry(state):
        return True
    if not any((state / name).exists() for name in ("models", "addresses.json")):
        raise ConfigurationError(
            f"{state}: not the state folder of a server; check --state, or start the server first:"
            f" `splitedge server run --state {state}`"
        )
    return False


def check_not_a_device(state: Path) -> None:
    """Check that `state` is no file, and not the folder of an enrolled device.

    Raises: ConfigurationError.
    """
    if state.is_file():
        raise ConfigurationError(f"--state {state}: a file, not a folder; check --state")
    if (state / IDENTITY_NAME).exists():
        raise ConfigurationError(
            f"{state}: the state folder of a device; give the server a folder of its own by --state"
        )
