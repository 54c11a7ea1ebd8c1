"""Logins of queries that were right a moment ago, so that the next query need not ask the registry.

Reading a login takes a thread and the database, which is longer than a small model computes
(docs/decisions/0081).
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from server.access.rules import Login, Rule
from server.errors import ForbiddenError
from server.registry.records import ApiKey

# a key or a device that is revoked may ask models so much longer
FRESH_S: Final = 1.0
KNOWN_MOST: Final = 10_000


class RecentLogins:
    """The logins of the last FRESH_S, by their header and the address that they came from.

    It is for the thread of one event loop. It keeps hashes of the headers, no secrets.

    Args:
        key_used, device_heard: called with the key, or the id of the device, of a login that is
            found: each query counts.
    """

    def __init__(
        self,
        key_used: Callable[[ApiKey], None],
        device_heard: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key_used = key_used
        self._device_heard = device_heard
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, Login]] = OrderedDict()  # oldest first

    def keep(self, header: bytes, source: str, login: Login) -> None:
        """Keep a login that the registry has just found right.

        Args:
            header: the value of `Authorization`. source: address of the client: the audit log has
                each address that a login comes from.
        """
        mark = _mark(header, source)
        self._known.pop(mark, None)
        self._known[mark] = self._clock() + FRESH_S, login
        if len(self._known) > KNOWN_MOST:
            self._known.popitem(last=False)

    def find(self, header: bytes, source: str, rule: Rule, model: str) -> Login | None:
        """The login of a query that need not be read from the registry.

        Args:
            header, source: as in `keep`. rule: of the query. model: that it asks.
        Returns: None for a login that was not right within FRESH_S from that address; and for one
            that may not ask the model, since the registry may know better by now.
        """
        mark = _mark(header, source)
        fresh_until, login = self._known.get(mark, (0.0, None))
        if login is None:
            return None
        if self._clock() >= fresh_until:
            del self._known[mark]
            return None
        try:
            rule.check(login)
            login.check_model(model)
        except ForbiddenError:
            return None
        if login.key is not None:
            self._key_used(login.key)
        elif login.device is not None:
            self._device_heard(login.device.id)
        return login


def _mark(header: bytes, source: str) -> bytes:
    return hashlib.sha256(source.encode() + b"\0" + header).digest()
