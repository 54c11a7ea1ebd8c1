"""Strangers that connect to the trainer and say nothing, or half of something."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.waiting import wait_until

SHAPE = (1, 8, 8)
SILENT = 60


def closed(peer: socket.socket) -> bool:
    """Whether the trainer has ended the connection; what it said before is thrown away."""
    peer.setblocking(False)
    try:
        while peer.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.deadline
def test_silent_sockets_at_the_trainers_port_are_closed_and_keep_no_device_out(
    make_trainer: Callable[..., Any],
) -> None:
    """FAULTS row 22, at the port of `splitedge train`."""
    trainer = make_trainer(SHAPE, fetch_s=0.5)
    at = urlsplit(trainer.url)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((at.hostname, at.port), timeout=10))
            for _ in range(SILENT)
        ]
        for peer in silent[::2]:
            peer.sendall(b"POST /train/join HTTP/1.1\r\nHost: loc")
        # while they are there, a device joins, and polls as it does between rounds
        link = trainer.link(trainer.enrol("pi"))
        link.join(30, SHAPE)
        assert link.fetch("", 1.0) is None
        wait_until(lambda: all(map(closed, silent)), "silent sockets are held", 20)
        assert link.fetch("", 1.0) is None
    assert trainer.mailbox.wait_for_devices(1, 1.0) == ["pi"]
