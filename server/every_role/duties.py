"""Recurring duties of a process, whose failures are logged once and end nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_sdk.errors import SplitedgeError
from server.errors import RegistryError, gist

logger = logging.getLogger(__name__)


class Duties:
    """Does duties by name, and knows which of them failed the last time; for one thread."""

    def __init__(self) -> None:
        self._complaints: dict[str, str] = {}

    def fails(self, duty: str) -> bool:
        """Whether a duty failed the last time that it was done."""
        return duty in self._complaints

    def do(
        self, duty: str, work: Callable[[], None], *, fatal: tuple[type[SplitedgeError], ...] = ()
    ) -> None:
        """Do a duty; log its failure once, until it succeeds or fails in another way.

        Args:
            fatal: failures that are raised.
        """
        try:
            work()
        except fatal:
            raise
        except SplitedgeError as err:
            if self._complaints.get(duty) != gist(err):
                # the registry says its own troubles, once for all duties
                level = logging.DEBUG if isinstance(err, RegistryError) else logging.WARNING
                logger.log(level, "%s: %s; it is tried again", duty, err)
            self._complaints[duty] = gist(err)
        except Exception as err:  # outermost loop of this thread: it must go on
            kind = f"{type(err).__name__}: {gist(err)}"
            if self._complaints.get(duty) != kind:  # no traceback a second
                logger.exception("%s: housekeeping failed; it is tried again", duty)
            self._complaints[duty] = kind
        else:
            if self._complaints.pop(duty, None) is not None:
                logger.info("%s: works again", duty)
