"""Queries over HTTP: those above the broker's message size."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from edge_sdk.errors import SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.offload.pending import CLOSED, NoReply, Pending
from edge_sdk.wire.messages import Query, Reply

logger = logging.getLogger(__name__)

WORKERS: Final = 2


class HttpQueries:
    """Sends queries in threads of its own, which start with the first query.

    Args:
        complete: called in such a thread with the reply to a query.
        count: called there with the bytes that were sent and received for a query.
    """

    def __init__(
        self,
        identity: Identity,
        complete: Callable[[Pending, Reply], None],
        count: Callable[[Pending, int, int], None],
    ) -> None:
        self._identity = identity
        self._complete = complete
        self._count = count
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def send(self, query: Query, pending: Pending) -> None:
        """Queue a query; its outcome is set by its deadline."""
        with self._lock:
            if self._closed:
                pending.complete(NoReply(CLOSED))
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(WORKERS, "splitedge-http")
            self._pool.submit(self._ask, query, pending)

    def change_identity(self, identity: Identity) -> None:
        """Send queries with another credential from now on."""
        self._identity = identity

    def close(self) -> None:
        """End the threads. Queries that wait for a thread get no outcome here."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _ask(self, query: Query, pending: Pending) -> None:
        from edge_sdk.api import infer  # noqa: PLC0415 - urllib3 takes 2 MB, and few agents need it

        if pending.done:
            return
        pending.sent_at = time.monotonic()
        try:
            reply = infer(self._identity, query, pending.deadline, partial(self._count, pending))
            self._complete(pending, reply)
        except SplitedgeError as err:
            pending.complete(NoReply(str(err)))
        except Exception as err:  # the executor would keep it, and the caller would wait
            logger.exception("an offload over HTTP failed")
            pending.complete(NoReply(f"not sent: {err}"))
