"""Sockets that listen: on an address, and in a state folder."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.address import Address

SOCKET_NAME: Final = "agent.sock"


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens.

    Attributes:
        address: where; port 0 has become a free one.
    """

    socket: socket.socket
    address: Address

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


def listen(address: Address, option: str = "--http") -> Listener:
    """Listen there; connections wait until a server accepts them.

    Args:
        option: that gave the address, for errors.
    Raises: ConfigurationError if the address is taken, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # accepted connections take it over: their messages are small and awaited
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind((address.host, address.port))
        listening.listen()  # two servers can bind one port; only one can listen there
    except OSError as err:
        listening.close()
        raise ConfigurationError(
            f"{option} {address}: cannot listen there ({err.strerror}); {listening_advice(err)}"
        ) from err
    return Listener(listening, Address(address.host, int(listening.getsockname()[1])))


def listening_advice(err: OSError) -> str:
    """Advice on an address on which a socket cannot listen."""
    if isinstance(err, socket.gaierror) or err.errno == errno.EADDRNOTAVAIL:
        return "its host is no address of this machine; give one, or 127.0.0.1"
    return "choose another port"


@contextlib.contextmanager
def listen_in(state: Path) -> Iterator[socket.socket]:
    """Listen on the socket in a state folder; it is removed at the end of the block.

    Only the folder's owner can connect. Call it with the folder's lock: then a socket that is there
    was left by a process that was killed, and is replaced.

    Raises: OSError if the file system has no sockets.
    """
    path = state / SOCKET_NAME
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(state) as short:
            with contextlib.suppress(FileNotFoundError):
                short.unlink()
            listening.bind(str(short))
            short.chmod(0o600)  # nobody can connect before `listen`
        listening.listen()
        yield listening
    finally:
        listening.close()
        with contextlib.suppress(OSError):
            path.unlink()


def connect_in(state: Path) -> socket.socket | None:
    """A connection to the process that listens in a state folder; None if there is none.

    Raises: OSError if there is one, and it cannot be asked.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(state) as short:
            if not stat.S_ISSOCK(short.stat().st_mode):
                connection.close()
                return None
            connection.connect(str(short))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _short_path(state: Path) -> Iterator[Path]:
    """The socket's path by an open folder: a socket's name has room for 107 bytes only."""
    folder = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{folder}") / SOCKET_NAME
    finally:
        os.close(folder)
