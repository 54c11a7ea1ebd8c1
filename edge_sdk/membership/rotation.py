"""Replacing this device's credential, so that a power cut at any moment leaves one that works.

1. The server makes a new credential, which is valid beside the old one for ten minutes.
2. The device writes it to `agent.next.json`, synced to the disk.
3. The device confirms it, with it: from then on the server takes the new one only.
4. The device writes it to `agent.json`, and deletes `agent.next.json`.

Cut off before 3, the old one is valid; cut off after 3, the new one is on the disk, and
`current_identity` goes on from there. To confirm twice changes nothing.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.durable import write_atomic
from edge_sdk.errors import EnrolmentError, LinkError, SplitedgeError, StateInUseError, StorageError
from edge_sdk.identity import Identity
from edge_sdk.state import StateLock

logger = logging.getLogger(__name__)

NEXT_NAME: Final = "agent.next.json"
FINISH_TIMEOUT_S: Final = 3.0


def rotate(state: Path) -> Identity:
    """Replace the credential of the device with that state folder.

    A running agent has to be told: use `EdgeAgent.rotate`, or `splitedge agent rotate`.

    Returns: the identity from now on.
    Raises: LinkError if the server cannot be reached: repeat it; EnrolmentError if the server does
        not accept this device; StorageError; StateInUseError while another process does the same.
    """
    with lock_credential(state):
        identity = _finish(state, Identity.load(state))
        from edge_sdk.api import new_credential  # noqa: PLC0415 - urllib3, only to rotate

        new = replace(identity, credential=new_credential(identity))
        write_atomic(state / NEXT_NAME, orjson.dumps({"credential": new.credential}), mode=0o600)
        return _confirm(state, new)


def lock_credential(state: Path) -> StateLock:
    """Exclusive use of the files that hold the credential; a rotation takes some seconds.

    Raises: StateInUseError saying to try again; StorageError.
    """
    try:
        return StateLock(state, "rotation")
    except StateInUseError as err:
        raise StateInUseError(
            f"{state}: the device's credential is being replaced at this moment; run it again in"
            " some seconds"
        ) from err


def current_identity(state: Path) -> Identity:
    """The identity of the device, after a rotation that was cut off is brought to its end.

    Without a server it is the one on the disk.

    Raises: as `Identity.load`.
    """
    identity = Identity.load(state)
    if not (state / NEXT_NAME).exists():
        return identity
    try:
        with lock_credential(state):
            return _finish(state, Identity.load(state))
    except StateInUseError:  # another process is at it
        return identity
    except SplitedgeError as err:
        logger.warning("the new credential is not confirmed yet: %s", err)
        return Identity.load(state)


def _finish(state: Path, identity: Identity) -> Identity:
    """Confirm the credential of a rotation that was cut off, or forget it if it is too old."""
    path = state / NEXT_NAME
    try:
        credential = str(orjson.loads(path.read_bytes())["credential"])
    except FileNotFoundError:
        return identity
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as err:
        logger.warning("%s: unreadable, left out (%s)", path, err)
        path.unlink(missing_ok=True)
        return identity
    try:
        return _confirm(state, replace(identity, credential=credential), FINISH_TIMEOUT_S)
    except EnrolmentError:
        from edge_sdk.api import is_approved  # noqa: PLC0415

        # it was never confirmed, and its time is over, if the one in agent.json is valid
        is_approved(identity, timeout_s=FINISH_TIMEOUT_S)
        path.unlink(missing_ok=True)
        return identity


def _confirm(state: Path, new: Identity, timeout_s: float | None = None) -> Identity:
    from edge_sdk.api import TIMEOUT_S, confirm_credential  # noqa: PLC0415

    try:
        confirm_credential(new, timeout_s=timeout_s or TIMEOUT_S)
    except LinkError as err:
        raise LinkError(f"{err}; run it again: until then the old credential is tried too") from err
    try:
        new.save(state)
        (state / NEXT_NAME).unlink(missing_ok=True)
    except (OSError, StorageError) as err:
        # it is in agent.next.json too, and is confirmed and moved from there once there is space
        logger.warning("the new credential is valid, and stays in %s: %s", NEXT_NAME, err)
    return new
