"""Inviting devices to train: commands over MQTT, which the running server publishes.

A device that was offline is invited again, for as long as training goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.errors import LinkError
from edge_sdk.http import HttpClient, Timeout
from edge_sdk.tls import pinned_tls_context
from edge_sdk.training.device.trainer_address import INVITATION
from server.errors import ServerError
from server.registry.database import Registry
from server.training.fleet.mailbox import Mailbox

logger = logging.getLogger(__name__)

AGAIN_S: Final = 5.0
TIMEOUT: Final = Timeout(connect_s=5.0, read_s=5.0)
ANSWER_BYTES: Final = 65_536


class Inviter:
    """Invites every enrolled device that has not joined.

    Args:
        server: URL of the running server.
        secret: of the server's operator.
        trainer: URL that devices are told.
        pinned: PEM file of the server's certificate; None for a server on http.
    """

    def __init__(self, server: str, secret: str, trainer: str, pinned: Path | None) -> None:
        self._server = server.rstrip("/")
        self._headers = {"Authorization": f"Bearer operator:{secret}"}
        self._body = orjson.dumps({"op": INVITATION, "url": trainer})
        # the certificate has the host name that devices use, which need not be the one used here
        self._client = HttpClient(tls=None if pinned is None else pinned_tls_context(pinned))

    @contextmanager
    def inviting(self, registry: Registry, mailbox: Mailbox) -> Iterator[None]:
        """Keep inviting in a thread of its own."""
        stopping = threading.Event()

        def work() -> None:
            while True:
                self.invite_missing(registry, mailbox)
                if stopping.wait(AGAIN_S):
                    return

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            self._client.close()

    def invite_missing(self, registry: Registry, mailbox: Mailbox) -> None:
        """Invite every device that has not joined; one that cannot be reached is invited later."""
        joined = set(mailbox.wait_for_devices(0, 0))
        try:
            devices = [d.id for d in registry.devices() if d.active]
        except ServerError as err:  # the database is busy or away; the next attempt may succeed
            logger.warning("invitations: %s", err)
            return
        for device in devices:
            if device not in joined:
                self._invite(device)

    def _invite(self, device: str) -> None:
        url = f"{self._server}/api/v1/devices/{device}/command"
        try:
            response = self._client.request(
                "POST",
                url,
                headers={**self._headers, "Content-Type": "application/json"},
                body=self._body,
                timeout=TIMEOUT,
                at_most=ANSWER_BYTES,
                repeatable=True,  # a device that trains ignores a second invitation
            )
        except LinkError as err:
            logger.info("device=%s not invited: %s", device, err)
            return
        if response.status != 202:
            logger.info("device=%s not invited: HTTP %d", device, response.status)
