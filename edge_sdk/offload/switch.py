"""Switch of a device's offloading, which a user turns off and on while the agent runs.

Off is kept in the state folder, so a restart leaves it off.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.durable import write_atomic
from edge_sdk.errors import StorageError

logger = logging.getLogger(__name__)

SWITCH_NAME: Final = "offloading.json"


class OffloadSwitch:
    """Whether a device may ask its server.

    Args:
        state: folder of the device.
    Attributes:
        on: False where a user turned it off, in this run or an earlier one. A file that cannot be
            read counts as off: the user's wish may have been to send nothing.
    """

    def __init__(self, state: Path) -> None:
        self._path = state / SWITCH_NAME
        self._lock = threading.Lock()
        self.on = self._load()

    def turn(self, on: bool) -> None:
        """Turn it on or off, now and for later runs.

        Raises: StorageError if the disk cannot keep it: then it holds for this run only.
        """
        with self._lock:
            changed, self.on = on != self.on, on
            try:
                write_atomic(self._path, orjson.dumps({"offloading": on}), mode=0o600)
            except StorageError as err:
                word = "on" if on else "off"
                raise StorageError(
                    f"offloading is {word} until the agent ends, but not later: {err}",
                    needed_bytes=err.needed_bytes,
                    available_bytes=err.available_bytes,
                ) from err
        if changed:
            logger.info("offloading is turned %s", "on" if on else "off")

    def _load(self) -> bool:
        try:
            return bool(orjson.loads(self._path.read_bytes())["offloading"])
        except FileNotFoundError:
            return True
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as err:
            logger.warning(
                "%s: cannot be read (%s), so the device asks no server; run `splitedge agent"
                " offloading on` to let it",
                self._path,
                err,
            )
            return False
