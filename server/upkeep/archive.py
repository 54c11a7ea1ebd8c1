"""Files of a backup: a folder or a tar file, with a list of their hashes at the end.

The list, `backup.json`, is written last. So a backup that was cut off has none, and is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Protocol, cast

import orjson

from edge_sdk.durable import make_folder, storage_error, sync_file, sync_folder
from edge_sdk.errors import ConfigurationError

LIST_NAME: Final = "backup.json"
FORMAT: Final = 1
SUFFIX: Final = ".tar"


@dataclass(frozen=True, slots=True)
class BackupList:
    """The list of a backup.

    Attributes:
        made_at: UTC seconds since 1970.
        release: of the program that made it.
        files: SHA-256 in hex by name.
    """

    made_at: float
    release: str
    files: Mapping[str, str]


class BackupWriter:
    """Writes a backup; what is not finished is deleted by `discard`.

    Args:
        out: a name that ends in .tar, or a folder that does not exist or is empty.
    Raises: ConfigurationError if there is something at `out`; StorageError.
    """

    def __init__(self, out: Path) -> None:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigurationError(f"{out}: exists already; give the backup another name")
        self._out = out
        make_folder(out.absolute().parent)
        self._temporary = out.with_name(f".{out.name}.tmp")
        self._remove_temporary()
        self._sink: _Sink
        if out.suffix == SUFFIX:
            self._sink = _TarSink(self._temporary)
        else:
            self._sink = _FolderSink(self._temporary)
        self.files: dict[str, str] = {}

    def add(self, name: str, path: Path) -> None:
        """Add a file under a name.

        Raises: FileNotFoundError if it is not there; StorageError if it cannot be kept.
        """
        with path.open("rb") as file:
            reader = _Hashing(file)
            try:
                self._sink.put(name, reader, os.fstat(file.fileno()).st_size)
            except OSError as err:
                raise storage_error(self._out, path.stat().st_size, err) from err
            self.files[name] = reader.digest

    def finish(self, made_at: float, release: str) -> None:
        """Write the list, and put the backup in its place.

        Raises: StorageError.
        """
        about = {"format": FORMAT, "made_at": made_at, "release": release, "files": self.files}
        raw = orjson.dumps(about, option=orjson.OPT_INDENT_2)
        try:
            self._sink.put(LIST_NAME, io.BytesIO(raw), len(raw))
            self._sink.close()
            if self._out.is_dir():
                self._out.rmdir()
            self._temporary.rename(self._out)
            sync_folder(self._out.absolute().parent)
        except OSError as err:
            raise storage_error(self._out, len(raw), err) from err

    def discard(self) -> None:
        """Delete what was written, unless it was finished."""
        self._sink.abandon()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary.is_dir():
            shutil.rmtree(self._temporary)
        else:
            self._temporary.unlink(missing_ok=True)


def extract(backup: Path, folder: Path) -> BackupList:
    """Copy the files of a backup into an existing folder, and check each by its hash.

    Raises: ConfigurationError for what is no backup, or is damaged; StorageError.
    """
    try:
        if backup.is_dir():
            _copy_folder(backup, folder)
        else:
            _extract_tar(backup, folder)
    except (tarfile.TarError, EOFError) as err:
        raise ConfigurationError(f"{backup}: not a backup of a server ({err})") from err
    except OSError as err:
        if isinstance(err, FileNotFoundError) and not backup.exists():
            raise ConfigurationError(
                f"{backup}: not found; give a backup's file or folder"
            ) from err
        raise storage_error(folder, 0, err) from err
    listed = _read_list(backup, folder / LIST_NAME)
    (folder / LIST_NAME).unlink()
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if there != set(listed.files):
        odd = min(there.symmetric_difference(listed.files))
        raise ConfigurationError(
            f"{backup}: {odd} is missing, or does not belong to it; use another backup"
        )
    for name, digest in listed.files.items():
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ConfigurationError(f"{backup}: {name} is damaged; use another backup")
    return listed


class Source(Protocol):
    """A source of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""


class _Sink(Protocol):
    """A place for the files of a backup."""

    def put(self, name: str, source: Source, size: int) -> None:
        """Write a file."""

    def close(self) -> None:
        """Write all of it to the disk."""

    def abandon(self) -> None:
        """Let go of what is open."""


class _FolderSink:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)

    def put(self, name: str, source: Source, size: int) -> None:
        path = self._folder / name
        make_folder(path.parent, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            shutil.copyfileobj(source, file)
            if file.tell() != size:
                raise OSError(errno.EIO, f"{name} changed while it was read")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for path in (self._folder, *self._folder.rglob("*")):
            if path.is_dir():
                sync_folder(path)

    def abandon(self) -> None:
        pass


class _TarSink:
    def __init__(self, path: Path) -> None:
        self._path = path
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(handle, "wb")
        self._tar = tarfile.open(fileobj=self._file, mode="w")  # noqa: SIM115 - closed by `close`

    def put(self, name: str, source: Source, size: int) -> None:
        entry = tarfile.TarInfo(name)
        entry.size = size
        entry.mode = 0o600
        self._tar.addfile(entry, cast(IO[bytes], source))  # it is only read

    def close(self) -> None:
        self._tar.close()
        self._file.close()
        sync_file(self._path)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # what was not written yet may not fit on the disk
            self._file.close()


class _Hashing:
    """A file that is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        return data

    @property
    def digest(self) -> str:
        """SHA-256 in hex of what was read."""
        return self._hash.hexdigest()


def _extract_tar(backup: Path, folder: Path) -> None:
    with tarfile.open(backup, "r:") as tar:
        for entry in tar:
            _check_name(backup, entry.name)
            source = tar.extractfile(entry) if entry.isreg() else None
            if source is None:
                raise ConfigurationError(f"{backup}: {entry.name!r} is no plain file; refused")
            _write(folder / entry.name, source)


def _copy_folder(backup: Path, folder: Path) -> None:
    for path in sorted(backup.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() or not path.is_file():
            raise ConfigurationError(f"{backup}: {path.name!r} is no plain file; refused")
        with path.open("rb") as source:
            _write(folder / path.relative_to(backup), source)


def _write(path: Path, source: Source) -> None:
    make_folder(path.parent, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        shutil.copyfileobj(source, file)


def _check_name(backup: Path, name: str) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ConfigurationError(f"{backup}: a file named {name!r} would leave the folder; refused")


def _read_list(backup: Path, path: Path) -> BackupList:
    try:
        data: dict[str, Any] = orjson.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise ConfigurationError(
                f"{backup}: has format {data['format']}, this program reads format {FORMAT}; use"
                f" splitedge {data.get('release')} or newer"
            )
        return BackupList(float(data["made_at"]), str(data["release"]), dict(data["files"]))
    except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as err:
        raise ConfigurationError(
            f"{backup}: has no whole {LIST_NAME}, so it is no backup, or was cut off; use another"
        ) from err
