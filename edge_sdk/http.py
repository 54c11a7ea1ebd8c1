"""HTTP as devices speak it: bounded waits, bounded answers, no redirects. Only importer of urllib3.

    with HttpClient(tls=tls_context_for(url, ca)) as client:
        response = client.request("GET", url, timeout=Timeout(total_s=10.0), at_most=65_536)

Whatever the network does is a LinkError. A status other than 200 is an answer, not an error.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, cast

import urllib3

from edge_sdk.errors import LinkError

CHUNK_BYTES: Final = 65_536

_NOISE: Final = re.compile(r"^HTTPS?Connection(Pool)?\(.*?\): |\[Errno -?\d+\] | \(_ssl\.c:\d+\)$")


class ResponseTooLargeError(LinkError):
    """An answer longer than the caller takes."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """Time limits of one exchange, in seconds; None sets no limit.

    Attributes:
        connect_s: to set up a connection.
        read_s: between two pieces of the answer.
        total_s: from the request to the last byte. A socket's timeout starts again with each
            byte, so a peer that sends slowly is left at most `total_s` after the deadline.
    """

    connect_s: float | None = None
    read_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer. The names of `headers` match in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class StreamedResponse:
    """An answer with a body that is read piece by piece."""

    def __init__(self, response: urllib3.BaseHTTPResponse, url: str) -> None:
        self._response = response
        self.url = url
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers

    def pieces(self) -> Iterator[bytes]:
        """The body's bytes as they arrive, never unpacked.

        Raises: LinkError if the connection breaks before the body is whole.
        """
        try:
            # read1: `stream` gathers whole chunks, and loses one when the connection breaks
            while piece := self._response.read1(CHUNK_BYTES, decode_content=False):
                yield piece
        except (urllib3.exceptions.HTTPError, OSError) as err:
            raise LinkError(f"{self.url}: the answer broke off ({_cause(err)})") from err


class HttpClient:
    """Requests over connections that stay open in between; safe from any thread.

    Args:
        tls: for https; None takes the system's authorities. A context that checks no host name
            (`pinned_tls_context`) is taken at its word.
        connections: how many stay open to one server.
        retries: how often a request is sent again after its connection failed.
        head_s: seconds that the head of an answer may take in all; None for no limit. A socket's
            timeout starts again with each byte of it.
    """

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        connections: int = 1,
        retries: int = 0,
        head_s: float | None = None,
    ) -> None:
        again = urllib3.Retry(retries, redirect=0, status=0, backoff_factor=0.2)
        self._pool = urllib3.PoolManager(
            maxsize=connections, ssl_context=tls, retries=again if retries else False
        )
        if head_s is not None:
            self._pool.pool_classes_by_scheme = _pools_that_bound_the_head(head_s)
        if tls is not None and not tls.check_hostname:
            self._pool.connection_pool_kw["assert_hostname"] = False

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: Timeout,
        at_most: int,
        repeatable: bool = False,
    ) -> Response:
        """Send a request and read the whole answer.

        Args:
            at_most: bytes that the answer's body may have.
            repeatable: as `stream` takes it.
        Raises: ResponseTooLargeError; LinkError.
        """
        end = None if timeout.total_s is None else time.monotonic() + timeout.total_s
        received = bytearray()
        with self.stream(
            method, url, headers=headers, body=body, timeout=timeout, repeatable=repeatable
        ) as response:
            for piece in response.pieces():
                received += piece
                if len(received) > at_most:
                    raise ResponseTooLargeError(
                        f"{url}: expected an answer of at most {at_most} bytes, got more"
                    )
                if end is not None and time.monotonic() > end:
                    raise LinkError(
                        f"{url}: expected the whole answer within {timeout.total_s:.1f} s, got"
                        f" {len(received)} bytes of it; is the link this slow?"
                    )
            return Response(response.status, response.headers, bytes(received))

    @contextmanager
    def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: Timeout,
        repeatable: bool = False,
    ) -> Iterator[StreamedResponse]:
        """Send a request; the answer's body is read inside the block.

        Args:
            repeatable: whether the request may reach the server twice. Then it is sent once more
                if the server closed the open connection while it was idle.
        Raises: LinkError if the server cannot be reached.
        """

        def send() -> urllib3.BaseHTTPResponse:
            return self._pool.request(
                method,
                url,
                body=body,
                # a compressed megabyte may unfold to a gigabyte
                headers={"Accept-Encoding": "identity", **(headers or {})},
                timeout=urllib3.Timeout(
                    connect=timeout.connect_s, read=timeout.read_s, total=timeout.total_s
                ),
                redirect=False,  # it would carry the credential elsewhere
                preload_content=False,
                decode_content=False,
            )

        try:
            pool = self._pool.connection_from_url(url)
            opened = pool.num_connections
            try:
                response = send()
            except urllib3.exceptions.ProtocolError as err:
                # a server closes an idle connection at any time, also just as it is used again
                reused = pool.num_connections == opened
                if not (repeatable and reused and isinstance(_inmost(err), ConnectionError)):
                    raise
                response = send()
        except (urllib3.exceptions.HTTPError, OSError) as err:
            raise LinkError(f"{url}: cannot be reached ({_cause(err)}); {_advice(err)}") from err
        try:
            yield StreamedResponse(response, url)
        finally:
            response.close()  # what is left of the body must not be the next answer

    def close(self) -> None:
        """Close all connections; a later request opens a new one."""
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _BoundedHead:
    """A connection that is cut if the head of an answer takes too long."""

    head_s: float
    sock: socket.socket

    def getresponse(self) -> urllib3.HTTPResponse:
        sock, late = self.sock, threading.Event()

        def cut() -> None:
            late.set()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self.head_s, cut)
        timer.daemon = True
        timer.start()
        try:
            response = super().getresponse()  # type: ignore[misc]  # of the connection that it is mixed into
        finally:
            timer.cancel()
        if late.is_set():  # http.client takes half a head for a whole one
            response.close()  # it holds the socket open
            raise TimeoutError(f"its head was not whole after {self.head_s:g} s")
        return cast("urllib3.HTTPResponse", response)


def _pools_that_bound_the_head(head_s: float) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """urllib3's pools, whose connections wait so long for the head of an answer."""
    limit = {"head_s": head_s}
    plain = type("BoundedHttp", (_BoundedHead, urllib3.connection.HTTPConnection), limit)
    tls = type("BoundedHttps", (_BoundedHead, urllib3.connection.HTTPSConnection), limit)
    return {
        "http": type("Pool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": plain}),
        "https": type("TlsPool", (urllib3.HTTPSConnectionPool,), {"ConnectionCls": tls}),
    }


def _cause(err: Exception) -> str:
    """The inmost reason, which urllib3 wraps, without numbers of errors and lines of C."""
    return _NOISE.sub("", str(_inmost(err)))[:300]


def _advice(err: Exception) -> str:
    """Advice on what to look at next."""
    inner = _inmost(err)
    if isinstance(inner, http.client.HTTPException):  # the port is open and speaks something else
        return "is this the address of the API, and not of the broker?"
    if "WRONG_VERSION_NUMBER" in str(inner):
        return "is it an http:// address, without TLS?"
    if "CERTIFICATE_VERIFY_FAILED" in str(inner):
        return _certificate_advice(str(inner))
    return "is the server running?"


def _certificate_advice(said: str) -> str:
    if "mismatch" in said:
        return "its certificate is for other names; use an address that the certificate names"
    if "expired" in said or "not yet valid" in said:
        return "check the certificate's dates, and the clock of this device"
    return (
        "its certificate is not trusted here; copy the server's certificate to this device and"
        " give --ca FILE to `agent enroll`, which keeps it as ca.pem in the state folder"
    )


def _inmost(err: Exception) -> Exception:
    if isinstance(inner := getattr(err, "reason", None), Exception):
        return _inmost(inner)
    # ProtocolError("Connection aborted.", the reason)
    return next((each for each in err.args[1:] if isinstance(each, Exception)), err)
