"""The API's side of a store: a copy of published models and signed bundles, kept up to date.

The state folder stays the truth. Files are written first, the index then, and what it no longer
names is deleted last: a reader sees the old state or the new one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from server.store.files import StoredFiles
from server.store.index import INDEX_NAME, StoreIndex

logger = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


class StoreUpload:
    """Copies a state folder's published files to a store.

    Args:
        published: folders of the models whose bundles are signed, `{state}/models/NAME/VERSION`.
    """

    def __init__(
        self, files: StoredFiles, state: Path, published: Callable[[], Iterable[Path]]
    ) -> None:
        self._files = files
        self._state = state
        self._published = published
        self._done: tuple[object, ...] | None = None
        self._hashes: dict[Path, tuple[Stamp, str]] = {}

    def refresh(self) -> None:
        """Bring the store in line with the state folder, if that has changed.

        Raises: StorageError; then the next call tries again.
        """
        folders = sorted(self._published())
        # every change of what is published signs a new timestamp
        timestamp = _stamp(self._state / "tuf" / "metadata" / "timestamp.json")
        now = (timestamp, *((folder, _stamp(folder / "model.json")) for folder in folders))
        if now == self._done:
            return
        wanted = self._wanted(folders)
        raw = self._files.read(INDEX_NAME)
        there = {} if raw is None else dict(StoreIndex.from_json(raw).files)
        index = StoreIndex(wanted)
        new = [name for name in index.in_order() if there.get(name) != wanted[name]]
        for name in new:
            self._files.upload(name, self._state / name)
        if there != wanted:
            self._files.write(INDEX_NAME, index.to_json())
        for name in there.keys() - wanted.keys():
            self._files.delete(name)
        self._done = now
        if new:
            logger.info("%s: %d files are written", self._files.url, len(new))

    def _wanted(self, folders: Iterable[Path]) -> dict[str, str]:
        tuf = self._state / "tuf"
        paths = [
            path
            for folder in (*folders, tuf / "metadata", tuf / "targets")
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        return {path.relative_to(self._state).as_posix(): self._hash(path) for path in paths}

    def _hash(self, path: Path) -> str:
        """SHA-256 of a file, read again only if it has changed."""
        stamp = _stamp(path)
        known = self._hashes.get(path)
        if known is None or known[0] != stamp:
            with path.open("rb") as file:
                known = stamp, hashlib.file_digest(file, "sha256").hexdigest()
            self._hashes[path] = known
        return known[1]


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:  # not there, or deleted meanwhile
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size
