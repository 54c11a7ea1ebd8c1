"""Waiting until the operator lets a new device in."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from edge_sdk.errors import LinkError
from edge_sdk.identity import Identity

FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 30.0


def wait_for_approval(
    identity: Identity,
    say: Callable[[str], None],
    *,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Return once the operator has let this device in: at once, if no approval is asked for.

    Args:
        say: called with a line for the user if the device has to wait.
    Raises: EnrolmentError if the operator rejected it; LinkError if the server cannot be reached
        at the first attempt. Later on the device waits for the server too.
    """
    from edge_sdk.api import is_approved  # noqa: PLC0415 - urllib3, only to ask

    pause_s, told = FIRST_PAUSE_S, False
    while True:
        try:
            if is_approved(identity):
                return
        except LinkError:
            if not told:
                raise
        if not told:
            say(
                "waiting for approval: ask the operator to run `splitedge server devices approve"
                f" {identity.device}`"
            )
            told = True
        sleep(random.uniform(0.75, 1.25) * pause_s)  # noqa: S311 - jitter, not a secret
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
