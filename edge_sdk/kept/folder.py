"""Folder of kept inputs: bounded, readable by people, and by DATA as a labelled folder.

    FOLDER/labelled/CLASS/ID.png      label by a correction of the user, else by the server's answer
    FOLDER/labelled/classes.txt       the folders of all classes, in the order of the labels
    FOLDER/unlabelled/ID.png          offloaded, but without an answer of the server
    FOLDER/index.jsonl                one line for each file: its label's source, and the answer
    FOLDER/kept.json                  input and classes of the model

Files are pictures (png, without loss) where the model takes pictures of bytes, else arrays (npy).
An input that comes again is kept once, with its newest label; a correction gives way to another
correction alone.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.kept.form import FORM, Array, KeptForm, read_form
from edge_sdk.kept.index import INDEX, KeptInput, read_index
from edge_sdk.manifest import BundleManifest
from edge_sdk.pipeline.samples import CLASSES_NAME
from edge_sdk.state import StateLock

logger = logging.getLogger(__name__)

LABELLED: Final = "labelled"
UNLABELLED: Final = "unlabelled"
_OURS: Final = re.compile(r"[0-9a-f]{32}\.(png|npy)")


class KeptFolder:
    """The files and the index of one folder, for one process, until `close`.

    Args:
        folder: it is made with the first input.
        inputs_max, bytes_max: limits of the files together. Beyond them the oldest input goes:
            first those that the user has not corrected.
    Attributes:
        relabelled: inputs whose label was replaced by another one.
    Raises: StateInUseError if another agent keeps its inputs there; ConfigurationError if the
        folder has other files in the place of ours; StorageError.
    """

    def __init__(self, folder: Path, inputs_max: int, bytes_max: int) -> None:
        self.folder = folder
        self._lock = StateLock(folder, "keep")
        self._inputs_max = inputs_max
        self._bytes_max = bytes_max
        self._torn = False
        self._digests: dict[str, bytes] = {}  # of the files' bytes, by id, once they were compared
        self.relabelled = 0
        try:
            self._form = read_form(folder)
            self._kept = OrderedDict((each.id, each) for each in read_index(folder))
            self._size_bytes = sum(each.size_bytes for each in self._kept.values())
            self._lines = len(self._kept)
            if self._form is not None:
                self._tidy()
        except BaseException:
            self._lock.release()
            raise

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Size of the files together."""
        return self._size_bytes

    def fits(self, manifest: BundleManifest) -> bool:
        """Whether inputs of this model can be kept here."""
        return self._form is None or self._form.fits(manifest)

    def put(self, x: Array, manifest: BundleManifest, entry: KeptInput) -> bool:
        """Keep an input, or give one that is kept another label; then drop what is beyond limits.

        An input is kept already if it has the same id or the same content. It stays as it is if it
        was corrected and this is no correction, or if only it has a label.

        Args:
            entry: its `file`, `size_bytes` and `class_name` are filled in here.
        Returns: False if a picture cannot hold the input's values, or it is above the limit alone.
        Raises: StorageError if the disk is full; OSError if it cannot be written otherwise.
        """
        if self._form is None:
            self._begin(KeptForm.of(manifest, x))
        assert self._form is not None
        data = self._form.encode(x)
        if data is None or len(data) > self._bytes_max:
            return False
        digest = hashlib.sha256(data).digest()
        olds = self._kept_already(entry.id, digest, len(data))
        if any(_stays(old, entry) for old in olds):
            return True
        name = "" if entry.label is None else manifest.class_names[entry.label]
        place = UNLABELLED
        if entry.label is not None:
            place = f"{LABELLED}/{self._form.folders[entry.label]}"
        file = f"{place}/{entry.id}.{self._form.ending}"
        entry = replace(entry, file=file, size_bytes=len(data), class_name=name)
        make_folder(self.folder / place)
        write_atomic(self.folder / file, data)
        for old in olds:
            del self._kept[old.id]
            self._digests.pop(old.id, None)
            self._size_bytes -= old.size_bytes
        self._kept[entry.id] = entry
        self._digests[entry.id] = digest
        self._size_bytes += entry.size_bytes
        self._append(asdict(entry))
        for old in olds:
            self._replace(old, entry)
        self._drop_oldest()
        return True

    def close(self) -> None:
        """Let another process keep inputs here."""
        self._lock.release()

    def _begin(self, form: KeptForm) -> None:
        make_folder(self.folder / LABELLED)
        lines = "".join(f"{name}\n" for name in form.folders)
        write_atomic(self.folder / LABELLED / CLASSES_NAME, lines.encode())
        write_atomic(self.folder / FORM, orjson.dumps(asdict(form), option=orjson.OPT_INDENT_2))
        self._form = form

    def _kept_already(self, identity: str, digest: bytes, size_bytes: int) -> list[KeptInput]:
        """The inputs with this id or this content: more than one where an older release kept it."""
        return [
            each
            for each in self._kept.values()
            if each.id == identity
            or (each.size_bytes == size_bytes and self._digest_of(each) == digest)
        ]

    def _digest_of(self, kept: KeptInput) -> bytes:
        if kept.id not in self._digests:
            try:
                data = (self.folder / kept.file).read_bytes()
            except OSError:  # a person deleted it
                return b""
            self._digests[kept.id] = hashlib.sha256(data).digest()
        return self._digests[kept.id]

    def _replace(self, old: KeptInput, new: KeptInput) -> None:
        """Delete the file of an input that is kept anew, and say so if it has another label now."""
        if old.id != new.id:
            self._append({"id": old.id, "gone": True})
        if old.file != new.file:
            (self.folder / old.file).unlink(missing_ok=True)
        if old.label is not None and old.label != new.label:
            self.relabelled += 1
            logger.info(
                "%s: input %s is %r now (%s), it was %r (%s)",
                self.folder,
                new.id,
                new.class_name,
                new.label_from,
                old.class_name,
                old.label_from,
            )

    def _drop_oldest(self) -> None:
        while len(self._kept) > self._inputs_max or self._size_bytes > self._bytes_max:
            uncorrected = (each for each in self._kept.values() if each.label_from != "correction")
            oldest = next(uncorrected, None) or next(iter(self._kept.values()))
            del self._kept[oldest.id]
            self._digests.pop(oldest.id, None)
            self._size_bytes -= oldest.size_bytes
            (self.folder / oldest.file).unlink(missing_ok=True)
            self._append({"id": oldest.id, "gone": True})

    def _append(self, line: dict[str, Any]) -> None:
        if self._torn or self._lines > 2 * self._inputs_max + 100:
            self._write_index()
            self._torn = False
            return
        try:
            with (self.folder / INDEX).open("ab") as index:
                index.write(orjson.dumps(line) + b"\n")
        except OSError:
            self._torn = True  # a part of the line may be there, and the next one would join it
            raise
        self._lines += 1

    def _write_index(self) -> None:
        lines = b"".join(orjson.dumps(asdict(each)) + b"\n" for each in self._kept.values())
        write_atomic(self.folder / INDEX, lines)
        self._lines = len(self._kept)

    def _tidy(self) -> None:
        """Delete strays and write the index anew; later, if the disk takes nothing now."""
        try:
            self._remove_strays()
            self._write_index()
        except (StorageError, OSError) as err:
            self._torn = True
            logger.warning("%s: the index was not written: %s", self.folder, err)

    def _remove_strays(self) -> None:
        """Delete files of ours that the index does not have: an agent was killed in between."""
        known = {each.file for each in self._kept.values()}
        for path in _files(self.folder):
            if str(path.relative_to(self.folder)) not in known:
                path.unlink(missing_ok=True)


def _stays(old: KeptInput, new: KeptInput) -> bool:
    """Whether a kept input stays as it is although it comes again."""
    if old.label_from == "correction":
        return new.label_from != "correction"
    return old.label is not None and new.label is None


def clear(folder: Path) -> int:
    """Delete the inputs that a folder keeps, its index and its folders; other files stay.

    Returns: how many inputs there were.
    Raises: ConfigurationError if it is no folder of kept inputs; StateInUseError while an agent
        keeps its inputs there.
    """
    if read_form(folder) is None:
        raise ConfigurationError(f"{folder}: expected a folder of kept inputs, found none")
    with StateLock(folder, "keep"):
        return _delete(folder)


def _delete(folder: Path) -> int:
    files = _files(folder)
    for path in (*files, folder / LABELLED / CLASSES_NAME, folder / INDEX, folder / FORM):
        path.unlink(missing_ok=True)
    for inner in (*(folder / LABELLED).glob("*"), folder / LABELLED, folder / UNLABELLED):
        with suppress(OSError):  # not empty: it holds files of the user
            inner.rmdir()
    return len(files)


def _files(folder: Path) -> list[Path]:
    places: Iterable[Path] = (folder / UNLABELLED, *(folder / LABELLED).glob("*/"))
    return [path for place in places for path in place.glob("*") if _OURS.fullmatch(path.name)]
