"""Measurements that this device made of its bundles, kept and reported to the server.

    {state}/measurements.json    one entry a bundle, oldest first

An entry stays unreported until a server took it. A server of an older release has no such route;
the entry is then offered again with the next update.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.durable import locked_folder, write_atomic
from edge_sdk.errors import LinkError, StorageError
from edge_sdk.identity import Identity
from profiles.errors import InvalidProfileError
from profiles.measured import BundleMeasurement

FILE_NAME: Final = "measurements.json"
KEPT_MOST: Final = 30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptMeasurement:
    """A measurement, the digest of the bundle's content, and whether the server has it."""

    digest: str
    measurement: BundleMeasurement
    reported: bool = False


class Measurements:
    """The measurements of a state folder. Several processes may use it at once."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._path = state / FILE_NAME

    def all(self) -> list[KeptMeasurement]:
        """Every kept measurement, oldest first; none if the file cannot be read."""
        try:
            entries = orjson.loads(self._path.read_bytes())
            return [_entry(entry) for entry in entries]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, InvalidProfileError) as err:
            logger.warning("%s: unreadable, taken as empty (%s)", self._path, err)
            return []

    def of(self, digest: str) -> BundleMeasurement | None:
        """The measurement of the bundle with that content; None if there is none."""
        found = (entry.measurement for entry in self.all() if entry.digest == digest)
        return next(found, None)

    def keep(self, digest: str, measurement: BundleMeasurement) -> None:
        """Keep a measurement, in place of an older one of the same content.

        A disk without room loses it, which is logged: no update fails for want of a measurement.
        """
        with self._locked():
            entries = [entry for entry in self.all() if entry.digest != digest]
            self._write([*entries, KeptMeasurement(digest, measurement)])

    def keep_times(self, digest: str, measurement: BundleMeasurement) -> None:
        """Keep the times of a bundle that was measured before; its memory stays as it was."""
        known = self.of(digest)
        if known is None:
            return
        graphs = {
            name: replace(graph, memory_bytes=known.graphs[name].memory_bytes)
            for name, graph in measurement.graphs.items()
            if name in known.graphs
        }
        self.keep(digest, replace(measurement, graphs=graphs, memory_bytes=known.memory_bytes))

    def report(self, identity: Identity) -> None:
        """Send the server what it does not have, as far as it can be reached and takes it."""
        from edge_sdk.api import report_measurement  # noqa: PLC0415 - urllib3, only to report

        sent: list[KeptMeasurement] = []
        for entry in self.all():
            if entry.reported:
                continue
            try:
                report_measurement(identity, entry.measurement)
            except LinkError as err:
                logger.info("%s was not reported: %s", entry.measurement.bundle, err)
                break
            sent.append(entry)
        if sent:
            self._note_reported(sent)

    def _note_reported(self, sent: list[KeptMeasurement]) -> None:
        with self._locked():
            # one that was measured again meanwhile is still to be reported
            known = [
                replace(entry, reported=entry in sent or entry.reported) for entry in self.all()
            ]
            self._write(known)

    def _locked(self) -> AbstractContextManager[None]:
        return locked_folder(self._state)

    def _write(self, entries: Iterable[KeptMeasurement]) -> None:
        kept = [
            {
                "digest": entry.digest,
                "measurement": entry.measurement.to_dict(),
                "reported": entry.reported,
            }
            for entry in entries
        ]
        try:
            write_atomic(self._path, orjson.dumps(kept[-KEPT_MOST:], option=orjson.OPT_INDENT_2))
        except StorageError as err:
            logger.warning("measurements were not saved: %s", err)


def _entry(data: Any) -> KeptMeasurement:
    measurement = BundleMeasurement.from_dict(data["measurement"])
    return KeptMeasurement(str(data["digest"]), measurement, bool(data["reported"]))
