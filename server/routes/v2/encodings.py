"""Compressed bodies: `Content-Encoding` of requests, `Accept-Encoding` of answers.

A body is inflated step by step, and refused as soon as it is above its limit: a kilobyte can stand
for a megabyte.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from edge_sdk.errors import FrameTooLargeError
from server.errors import BadRequestError
from server.listening.direct_request import Answer, Fields

# window bits of zlib: of gzip, and of zlib's own format, which HTTP calls deflate
_WINDOWS: Final[Mapping[str, int]] = {"gzip": 31, "deflate": 15}
STEP_BYTES: Final = 1_000_000
# shorter answers would not arrive sooner
LEAST_BYTES: Final = 1_024
# a longer answer is deflated in a thread: 64 KB take 1 ms
SHORT_BYTES: Final = 65_536
LEVEL: Final = 1


def encoding_of(headers: Mapping[str, str]) -> str | None:
    """The encoding of a request's body; None if it is not compressed.

    Raises: BadRequestError naming those that there are.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _WINDOWS:
        known = ", ".join(_WINDOWS)
        raise BadRequestError(f"Content-Encoding: expected {known}, got {encoding[:40]!r}")
    return encoding


async def inflate(
    body: bytes, encoding: str, limit_bytes: int, grown: Callable[[int], None]
) -> bytes:
    """A compressed body as it was, at most `limit_bytes` long.

    Args:
        grown: called with the size so far, in bytes; may raise.
    Raises: FrameTooLargeError; BadRequestError for bytes that are not of that encoding.
    """
    stream = zlib.decompressobj(_WINDOWS[encoding])
    parts: list[bytes] = []
    size, rest = 0, body
    while not stream.eof:
        try:
            part = await asyncio.to_thread(stream.decompress, rest, STEP_BYTES)
        except zlib.error as err:
            raise BadRequestError(f"body: is not {encoding} ({err})") from err
        rest = stream.unconsumed_tail
        if not part and not rest:
            break
        size += len(part)
        if size > limit_bytes:
            raise FrameTooLargeError(
                f"body: expected at most {limit_bytes} bytes once inflated, got more"
            )
        grown(len(body) + size)
        parts.append(part)
    if not stream.eof or stream.unused_data:
        what = "bytes after its end" if stream.eof else "no end"
        raise BadRequestError(f"body: expected one {encoding} stream, which has {what}")
    return b"".join(parts)


async def compressed(asked: str, body: bytes, kind: Fields) -> Answer:
    """An answer with status 200, compressed if its client takes that and it gets shorter.

    Args:
        asked: the request's header `Accept-Encoding`. kind: fields that say what the body is.
    """
    if is_short(body):
        return compressed_here(asked, body, kind)
    return await asyncio.to_thread(compressed_here, asked, body, kind)


def is_short(body: bytes) -> bool:
    """Whether an answer is compressed, if at all, before a thread would have woken."""
    return len(body) <= SHORT_BYTES


def compressed_here(asked: str, body: bytes, kind: Fields) -> Answer:
    """An answer as `compressed` makes it, in this thread."""
    if len(body) < LEAST_BYTES:
        return _plain(body, kind)
    encoding = accepted(asked)
    more = (*kind, (b"vary", b"Accept-Encoding"))
    if encoding is not None:
        packed = _deflate(body, encoding)
        if len(packed) < len(body):
            return _plain(packed, (*more, (b"content-encoding", encoding.encode())))
    return _plain(body, more)


def _plain(body: bytes, fields: Fields) -> Answer:
    return Answer(200, (*fields, (b"content-length", b"%d" % len(body))), body)


def accepted(header: str) -> str | None:
    """The encoding that a client likes best by its header `Accept-Encoding`; None for none."""
    weights: dict[str, float] = {}
    for entry in header.lower().split(","):
        coding, _, weight = entry.partition(";")
        name, _, value = weight.strip().partition("=")
        try:
            weights[coding.strip()] = float(value) if name == "q" else 1.0
        except ValueError:
            weights[coding.strip()] = 0.0
    found = {one: weights.get(one, weights.get("*", 0.0)) for one in _WINDOWS}
    best = max(found, key=lambda one: found[one])
    return best if found[best] > 0 else None


def _deflate(body: bytes, encoding: str) -> bytes:
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, _WINDOWS[encoding])
    return stream.compress(body) + stream.flush()
