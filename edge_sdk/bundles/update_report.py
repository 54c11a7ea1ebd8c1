"""The report on an update, which tells the server what this device runs now and what it refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from edge_sdk import api
from edge_sdk.bundles.run_update import UpdateOutcome
from edge_sdk.bundles.store import BundleStore
from edge_sdk.errors import NoBundleError, SplitedgeError
from edge_sdk.identity import Identity

logger = logging.getLogger(__name__)

# the agent waits for the updater's end before it switches to the new bundle
TIMEOUT_S: Final = 5.0
REASON_CHARACTERS: Final = 1000


def report_update(state: Path, outcome: UpdateOutcome) -> None:
    """Report the outcome of an update, if it came to one; nothing follows from a failure.

    A server of the release before has no such route: the heartbeat tells it what runs.
    """
    if outcome.status in ("unreachable", "busy"):
        return
    try:
        running = BundleStore(state).active().manifest.bundle
    except NoBundleError:
        running = None
    report = {
        "running": running,
        "bundle": outcome.bundle,
        "status": outcome.status,
        "reason": outcome.reason[:REASON_CHARACTERS],
    }
    try:
        api.report_update(Identity.load(state), report, timeout_s=TIMEOUT_S)
    except SplitedgeError as err:
        logger.debug("the update was not reported: %s", err)
