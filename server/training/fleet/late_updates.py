"""Updates of past rounds on the server's disk, until a checkpoint holds the weights they went into.

    FOLDER/late/000012-DEVICE.update

A device forgets an update when the trainer says that it was taken: by then the file is written.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from edge_sdk.durable import make_folder, sync_folder, write_atomic
from edge_sdk.errors import FrameError
from edge_sdk.training.protocol.messages import Update, from_bytes, to_bytes

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"(\d{6,})-([a-z0-9-]{1,63})\.update")


class LateUpdates:
    """Late updates stored in one training's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "late"

    def keep(self, device: str, update: Update) -> None:
        """Write an update to the disk, and remove all but two of that device.

        Two may be wanted, of the round under way and of one before; more would let a device fill
        the disk.

        Raises: StorageError.
        """
        make_folder(self._folder, mode=0o700)
        path = self._folder / f"{update.round:06}-{device}.update"
        write_atomic(path, to_bytes(update), mode=0o600)
        own = [kept for (name, _), kept in self._files().items() if name == device]
        for older in sorted(own, reverse=True)[2:]:
            older.unlink()

    def load(self, merged: Collection[tuple[str, int]] = ()) -> dict[str, Update]:
        """The newest update of each device; one that cannot be read is lost.

        Args:
            merged: (device, round) of those left out: a kill between the checkpoint that holds
                their merge and `prune` leaves their files.
        """
        found = {}
        files = {key: path for key, path in self._files().items() if key not in merged}
        for (device, _), path in sorted(files.items(), key=lambda entry: entry[1].name):
            try:
                update = from_bytes(path.read_bytes())
            except (OSError, FrameError) as err:
                logger.warning("%s: cannot be read, its update is lost: %s", path, err)
                continue
            if isinstance(update, Update):
                found[device] = update
        return found

    def prune(self, kept: Callable[[], Collection[tuple[str, int]]] = frozenset) -> None:
        """Remove all updates but those of `kept`, which gives (device, round).

        `kept` is called after the folder is listed, so an update that is written meanwhile stays.
        """
        files = self._files()
        wanted = kept()
        for key, path in files.items():
            if key not in wanted:
                path.unlink()
        if files:
            sync_folder(self._folder)

    def _files(self) -> dict[tuple[str, int], Path]:
        entries = self._folder.iterdir() if self._folder.is_dir() else []
        named = [(match, path) for path in entries if (match := _NAME.fullmatch(path.name))]
        return {(match[2], int(match[1])): path for match, path in named}
