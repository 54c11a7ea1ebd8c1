"""Waiting for a device's first bundle while it takes part in training.

A server without a model has no bundle for its devices, and the model comes from their training.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from edge_sdk.bundles import lifecycle
from edge_sdk.bundles.store import BundleStore
from edge_sdk.errors import NoBundleError, SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.state import StateLock
from edge_sdk.training.device.invitation import CommandLink

logger = logging.getLogger(__name__)

# A bundle that `splitedge agent update` installed is seen after this time.
LOOK_S: Final = 2.0
# The server is asked for a bundle this often, and at once when it says that there is one.
ASK_S: Final = 30.0


def wait_for_first_bundle(
    state: Path,
    on_command: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    """Return when this device has a bundle; its server's commands are followed meanwhile.

    Args:
        on_command: called with each command of the server, such as an invitation to train.
        say: called with a line for the user if there is no bundle yet.
    Raises: StateInUseError if an agent runs there; EnrolmentError if the state folder has no
        identity; ConfigurationError for a certificate file that cannot be used.
    """
    with StateLock(state):
        if _has_bundle(state) or _fetch(state):
            return
        say("no bundle yet: training first; this device answers as soon as it has a bundle")
        with CommandLink(Identity.load(state), state) as link:
            ask_at = time.monotonic() + ASK_S
            while not _has_bundle(state):
                with suppress(queue.Empty):
                    command = link.arrived.get(timeout=LOOK_S)
                    on_command(command)
                    if command.get("op") == "update":
                        ask_at = time.monotonic()
                if time.monotonic() >= ask_at:
                    _fetch(state)
                    ask_at = time.monotonic() + ASK_S


def _has_bundle(state: Path) -> bool:
    try:
        BundleStore(state).active()
    except NoBundleError:
        return False
    return True


def _fetch(state: Path) -> bool:
    """Fetch the assigned bundle, if there is one; a server that is away is asked again later."""
    try:
        lifecycle.update(state)
    except SplitedgeError as err:
        logger.warning("%s", err)
    return _has_bundle(state)
