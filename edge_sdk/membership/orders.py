"""Orders of the server to a running agent: replace the credential, lift a quarantine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from edge_sdk.errors import SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.membership.rotation import current_identity, rotate

logger = logging.getLogger(__name__)

ROTATE: Final = "rotate"
LIFT: Final = "lift-quarantine"


class Membership:
    """The identity of a running agent, and the orders that concern it.

    Args:
        changed: called with the new identity after each rotation, in the thread that did it.
        lift: lets a bundle be tried again, by its name.
    """

    def __init__(
        self,
        state: Path,
        identity: Identity,
        *,
        changed: Callable[[Identity], None],
        lift: Callable[[str], object],
    ) -> None:
        self.identity = identity
        self._state = state
        self._changed = changed
        self._lift_quarantine = lift
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def follow(self, command: Mapping[str, Any]) -> None:
        """Carry out an order in the background; other commands are left to others."""
        op, argument = command.get("op"), str(command.get("argument", ""))
        if op == ROTATE:
            self._start(ROTATE, self.rotate)
        elif op == LIFT:
            self._start(f"{LIFT} {argument}", partial(self._lift, argument))

    def rotate(self) -> None:
        """Replace the credential, and go on with the new one.

        Raises: as `edge_sdk.membership.rotation.rotate`.
        """
        self._take(rotate(self._state))

    def look(self) -> Identity:
        """The identity as it is on the disk: another process may have changed it."""
        self._take(current_identity(self._state))
        return self.identity

    def _take(self, identity: Identity) -> None:
        with self._lock:
            before, self.identity = self.identity, identity
        if identity == before:
            return
        new = identity.credential != before.credential
        what = "has a new credential" if new else "has a changed identity"
        logger.info("device=%s %s", identity.device, what)
        self._changed(identity)

    def _lift(self, bundle: str) -> None:
        from edge_sdk.api import report_done  # noqa: PLC0415 - urllib3, only to report

        self._lift_quarantine(bundle)
        report_done(self.identity, LIFT, bundle)

    def _start(self, order: str, work: Callable[[], None]) -> None:
        """Do the work in a thread; the same order under way is not begun again."""
        with self._lock:
            if order in self._busy:
                return
            self._busy.add(order)
        threading.Thread(target=self._do, args=(order, work), daemon=True).start()

    def _do(self, order: str, work: Callable[[], None]) -> None:
        try:
            work()
        except SplitedgeError as err:  # the server sends the order again
            logger.warning("%s: %s", order, err)
        except Exception:  # outermost call of this thread
            logger.exception("%s failed", order)
        finally:
            with self._lock:
                self._busy.discard(order)
