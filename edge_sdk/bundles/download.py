"""Downloads from the server: resumed where they broke off, bounded, and checked by SHA-256."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.bundles.store import FileRecord, file_damage
from edge_sdk.durable import storage_error, sync_file
from edge_sdk.errors import LinkError, UpdateRefusedError
from edge_sdk.http import HttpClient, ResponseTooLargeError, StreamedResponse, Timeout
from edge_sdk.identity import Identity
from edge_sdk.tls import tls_context_for

TIMEOUT: Final = Timeout(connect_s=5.0, read_s=15.0)
RETRIES: Final = 2  # of a connection that fails
REASON_CHARACTERS: Final = 500
ATTEMPTS: Final = 4  # per file and run; each goes on where the one before broke off
# an answer may take this long, and longer by a second for each so many bytes that have come
PATIENCE_S: Final = 20.0
BYTES_A_SECOND: Final = 1_000

_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class StatusError(LinkError):
    """An HTTP status that says that the answer does not hold the file."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """GET requests to the server with this device's credential.

    Args:
        check_dates: False while this device's clock is plainly wrong: ignores the dates of
            certificates, and only where the identity names its own authority.
        patience_s: seconds that the head of an answer may take, and the same for its body, besides
            those for the bytes that have come.
    Attributes:
        date: the server's clock in its last answer; None before the first.
    Raises: ConfigurationError if the authority's file cannot be used.
    """

    def __init__(
        self, identity: Identity, *, check_dates: bool, patience_s: float = PATIENCE_S
    ) -> None:
        self._patience_s = patience_s
        self._headers = {"Authorization": identity.authorization}
        tls = tls_context_for(identity.server, identity.ca, check_dates=check_dates)
        self._client = HttpClient(tls=tls, retries=RETRIES, head_s=patience_s)
        self.date: datetime | None = None

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[StreamedResponse]:
        """The answer to one GET, whatever its status; its body is read inside the block.

        Raises: LinkError.
        """
        sent = {**self._headers, **(headers or {})}
        with self._client.stream("GET", url, headers=sent, timeout=TIMEOUT) as response:
            self.date = _parse_date(response.headers.get("Date")) or self.date
            yield response

    def pieces(self, response: StreamedResponse) -> Iterator[bytes]:
        """The body's bytes as they arrive.

        Raises: LinkError if they come so slowly that the update would never end.
        """
        received, began = 0, time.monotonic()
        for piece in response.pieces():
            received += len(piece)
            took_s = time.monotonic() - began
            if took_s > self._patience_s + received / BYTES_A_SECOND:
                raise LinkError(
                    f"{response.url}: expected at least {BYTES_A_SECOND} bytes a second, got"
                    f" {received} in {took_s:.0f} s; the next update goes on from there"
                )
            yield piece

    def read(self, url: str, at_most: int) -> bytes:
        """The whole body of one GET.

        Raises: ResponseTooLargeError above `at_most` bytes; StatusError; LinkError.
        """
        body = bytearray()
        with self.get(url) as response:
            if response.status != 200:
                raise StatusError(f"{url}: {_reason(response)}", response.status)
            for piece in self.pieces(response):
                body += piece
                if len(body) > at_most:
                    raise ResponseTooLargeError(f"{url}: more than {at_most} bytes")
        return bytes(body)


def _reason(response: StreamedResponse) -> str:
    """The status of an answer, and the reason that the server gives, if it gives one."""
    try:
        # what comes at once: a server that sends slowly is not waited for
        why = str(orjson.loads(next(response.pieces(), b""))["error"])[:REASON_CHARACTERS]
    except (LinkError, orjson.JSONDecodeError, KeyError, TypeError):
        return f"HTTP {response.status}"
    return f"HTTP {response.status}: {why}"


def download(client: ServerClient, url: str, file: FileRecord, part: Path) -> None:
    """Download `url` to `part`, whole and synced; continue where `part` ends.

    The URL holds the file's hash, so what is behind it never changes and no `If-Range` is needed:
    the hash over all of it decides in the end.

    Raises: UpdateRefusedError if it is not what was signed; StatusError; LinkError; StorageError.
    """
    for attempt in range(ATTEMPTS):
        before = size_bytes(part)
        try:
            _continue(client, url, file, part)
        except StatusError:
            raise
        except UpdateRefusedError:
            remove(part)
            raise
        except LinkError:
            if attempt == ATTEMPTS - 1 or size_bytes(part) <= before:
                raise
            time.sleep(0.2 * 2**attempt)
            continue
        problem = file_damage(part, file)
        if problem is None:
            sync_file(part)
            return
        remove(part)
        if before == 0:
            raise UpdateRefusedError(f"{url}: {problem}")
        # the piece we went on from was damaged here, by a power cut say: once more from the start
    raise UpdateRefusedError(f"{url}: never came whole in {ATTEMPTS} attempts")


def size_bytes(path: Path) -> int:
    """The size of the file at `path`; 0 where there is none."""
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _continue(client: ServerClient, url: str, file: FileRecord, part: Path) -> None:
    """Fetch what is missing at the end of `part`."""
    start = size_bytes(part)
    if start >= file.length:
        return
    headers = {"Range": f"bytes={start}-"} if start else {}
    with client.get(url, headers) as response:
        if response.status not in (200, 206):
            raise StatusError(f"{url}: HTTP {response.status}", response.status)
        expected = f"bytes {start}-{file.length - 1}/{file.length}"
        if response.status == 200:
            start = 0  # a server without ranges sends it all again
        elif response.headers.get("Content-Range") != expected:
            got = response.headers.get("Content-Range")
            raise UpdateRefusedError(f"{url}: expected {expected}, got {got}")
        _append(client.pieces(response), file, part, start)


def _append(pieces: Iterator[bytes], file: FileRecord, part: Path, start: int) -> None:
    length = start
    try:
        with os.fdopen(os.open(part, _WRITE | (0 if start else os.O_TRUNC), 0o666), "r+b") as out:
            out.seek(start)
            for piece in pieces:
                length += len(piece)
                if length > file.length:
                    raise UpdateRefusedError(f"{part.name}: more than {file.length} bytes")
                out.write(piece)
    except OSError as err:  # the disk's: those of the link are LinkErrors
        raise storage_error(part, file.length, err) from err
    if length < file.length:
        raise LinkError(f"{part.name}: ended after {length} of {file.length} bytes")


def _parse_date(header: str | None) -> datetime | None:
    if header is None:
        return None
    try:
        return parsedate_to_datetime(header).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
