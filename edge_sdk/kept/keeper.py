"""Keeper: an observer that keeps the inputs which were offloaded or corrected.

Nothing is kept unless the user asks for it. Files are written in a thread of the keeper.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edge_sdk.answers.observer import Answered, AnswerObserver
from edge_sdk.answers.prediction import DEVICE, SERVER
from edge_sdk.errors import StorageError
from edge_sdk.kept.folder import KeptFolder
from edge_sdk.kept.index import KeptInput, LabelFrom
from edge_sdk.settings_file.keep_table import KeepTable

logger = logging.getLogger(__name__)

# Inputs that wait for the disk.
WAITING_BYTES: Final = 4_000_000
CLOSE_S: Final = 5.0


class Keeper(AnswerObserver):
    """Keeps inputs in a folder: see edge_sdk.kept.folder.

    Args:
        folder: of this agent alone.
    Raises: as `KeptFolder`.
    """

    name = "kept"
    remembers = frozenset({"x"})

    def __init__(self, folder: Path, table: KeepTable) -> None:
        self._folder = KeptFolder(folder, table.inputs, table.megabytes * 1_000_000)
        self._every_s = table.every
        self._due = 0.0
        self._waiting: deque[tuple[Answered, KeptInput]] = deque()
        self._waiting_bytes = 0
        self._state = threading.Condition()
        self._counts = {"written": 0, "dropped": 0, "refused": 0}
        self._said: set[str] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kept-inputs", daemon=True)
        self._thread.start()

    def answered(self, answered: Answered) -> None:
        """Keep an input that was offloaded, unless the one before it was kept just now."""
        source = answered.prediction.source
        if source == DEVICE or answered.x is None:
            return
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        if source == SERVER:
            self._queue(answered, answered.prediction.label, "server")
        else:
            self._queue(answered, None, "")

    def corrected(self, answered: Answered, label: int) -> None:
        """Keep an input that the user corrected."""
        self._queue(answered, label, "correction")

    def report(self) -> Mapping[str, Any]:
        """Inputs and bytes in the folder, labels that were replaced, and what was not kept."""
        with self._state:
            return {
                "folder": str(self._folder.folder),
                "inputs": len(self._folder),
                "bytes": self._folder.size_bytes,
                "relabelled": self._folder.relabelled,
                **self._counts,
            }

    def close(self) -> None:
        """Write what waits."""
        with self._state:
            self._closed = True
            self._state.notify()
        self._thread.join(CLOSE_S)
        self._folder.close()

    def _queue(self, answered: Answered, label: int | None, label_from: LabelFrom) -> None:
        assert answered.x is not None
        prediction = answered.prediction
        entry = KeptInput(
            id=prediction.id,
            file="",
            size_bytes=0,
            label=label,
            class_name="",
            label_from=label_from,
            at=round(time.time(), 3),
            bundle=answered.manifest.bundle,
            source=prediction.source,
            device_label=answered.decision.label,
            uncertainty=prediction.uncertainty,
            threshold=prediction.threshold,
        )
        size = answered.x.nbytes
        with self._state:
            if self._waiting and self._waiting_bytes + size > WAITING_BYTES:
                self._counts["dropped"] += 1
                self._say("inputs come faster than the disk takes them; some are not kept")
                return
            self._waiting.append((answered, entry))
            self._waiting_bytes += size
            self._state.notify()

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._waiting and not self._closed:
                    self._state.wait()
                if not self._waiting:
                    return
                answered, entry = self._waiting.popleft()
                assert answered.x is not None
                self._waiting_bytes -= answered.x.nbytes
            try:
                self._keep(answered, entry)
            except Exception:  # outermost loop of this thread: the next input may be kept
                logger.exception("%s: an input was not kept", self._folder.folder)
                with self._state:
                    self._counts["dropped"] += 1

    def _keep(self, answered: Answered, entry: KeptInput) -> None:
        assert answered.x is not None
        outcome = "refused"
        if not self._folder.fits(answered.manifest):
            self._say("it keeps inputs of another model; clear it or name another folder")
        else:
            try:
                if self._folder.put(answered.x, answered.manifest, entry):
                    outcome = "written"
                else:
                    self._say("some inputs cannot be kept: their values, or above the limit")
            except (StorageError, OSError) as err:
                outcome = "dropped"
                self._say(f"inputs are not kept: {err}")
        with self._state:
            self._counts[outcome] += 1

    def _say(self, what: str) -> None:
        if what not in self._said and len(self._said) < 100:
            self._said.add(what)
            logger.warning("%s: %s", self._folder.folder, what)
