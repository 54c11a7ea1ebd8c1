"""Bundles that ran out of memory: a smaller one in their place, and the server told.

A failed bundle is kept out for HOLD_S, not for ever: another program may have taken the memory.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from edge_sdk.bundles.measurements import Measurements
from edge_sdk.bundles.store import ActiveBundle, BundleStore
from edge_sdk.errors import SplitedgeError
from edge_sdk.identity import Identity

logger = logging.getLogger(__name__)

HOLD_S: Final = 3600.0
# the device waits for a smaller bundle meanwhile
TELL_TIMEOUT_S: Final = 3.0


def tell_failure(state: Path, bundle: str, why: str) -> bool:
    """Tell the server that a bundle ran out of memory; returns whether it took it."""
    from edge_sdk.api import report_failure  # noqa: PLC0415 - urllib3, only to report

    try:
        report_failure(Identity.load(state), bundle, why, timeout_s=TELL_TIMEOUT_S)
    except SplitedgeError as err:
        logger.info("bundle=%s the failure was not reported: %s", bundle, err)
        return False
    return True


def has_smaller(store: BundleStore, active: ActiveBundle) -> bool:
    """Whether the other slot holds a bundle that could run and takes less memory.

    Memory is what the trials measured; without both measurements, the files' sizes.
    """
    slot = store.inactive_slot()
    other, here = store.record(slot), store.record(active.slot)
    if other is None or here is None or not store.has_way_back():
        return False
    kept = Measurements(store.state)
    mine, its = kept.of(active.digest), kept.of(other.digest)
    if mine is not None and its is not None:
        return its.memory_bytes < mine.memory_bytes
    return other.size_bytes < here.size_bytes
