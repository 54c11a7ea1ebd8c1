"""The state folder of a server, told apart from a device's and from a folder that is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_sdk.errors import ConfigurationError
from edge_sdk.identity import IDENTITY_NAME
from server.registry.database import Registry, open_registry, registry_file


@contextmanager
def existing_registry(state: Path) -> Iterator[Registry]:
    """The registry of the server with this state folder, until the end of the block.

    Raises: ConfigurationError if no server has run there; RegistryError.
    """
    check_server_state(state)
    registry = open_registry(state)
    try:
        yield registry
    finally:
        registry.close()


def check_server_state(state: Path) -> None:
    """Check that a server has run on `state`, before anything is written.

    Raises: ConfigurationError.
    """
    check_not_a_device(state)
    if not registry_file(state).is_file():
        raise ConfigurationError(f"{state}: not the state folder of a server; check --state")


def check_not_a_device(state: Path) -> None:
    """Check that `state` is not the folder of an enrolled device.

    Raises: ConfigurationError.
    """
    if (state / IDENTITY_NAME).exists():
        raise ConfigurationError(
            f"{state}: the state folder of a device; give the server a folder of its own by --state"
        )
