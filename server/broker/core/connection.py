"""The connection of one client, without its socket: bytes in, bytes out, limits. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from server.broker.core.limits import Bucket, FlowWindow
from server.broker.core.packets import Will
from server.broker.core.rights import Rights

_JOINED_BYTES: Final = 4_096  # up to here, a copy costs less than another part


class Closing(Enum):
    """Ways in which the socket shall end."""

    NOT = "not"
    AFTER_OUTPUT = "after output"
    NOW = "now"


class Connection:
    """The state of one connection.

    Attributes:
        peer: address of the client, for the log.
        unsent: bytes that wait in the socket's buffers.
        written: all bytes that were written to the socket.
        taken_before: of those, the ones that had left the buffers at the last look.
        received: bytes of packets that are not handled yet.
        output: what shall be written to the socket.
        closing: whether and how the socket shall end.
        congested: the client does not take what is written; the owner of the socket says so.
        held: `Broker.work` stopped because of it, or of a full window.
        client_id, rights: set by the login; empty and None before.
        window: messages of the client that are not delivered yet, where it is held back by them.
        budget: what its packets may cost; None where no budget applies.
        left: it sent DISCONNECT, so its will is void (3.1.2.5).
    """

    __slots__ = (
        "_attention",
        "_output_bytes",
        "budget",
        "client_id",
        "closing",
        "congested",
        "counted_bytes",
        "ended",
        "heard_at",
        "held",
        "left",
        "moved_at",
        "output",
        "peer",
        "received",
        "rights",
        "silence_s",
        "taken_before",
        "unsent",
        "will",
        "window",
        "written",
    )

    def __init__(
        self,
        peer: str,
        unsent: Callable[[], int],
        written: Callable[[], int],
        attention: dict[Connection, None],
        now: float,
    ) -> None:
        self.peer = peer
        self.unsent = unsent
        self.written = written
        self.received = bytearray()
        self.output: list[bytes] = []
        self.closing = Closing.NOT
        self.congested = False
        self.held = False
        self.client_id = ""
        self.rights: Rights | None = None
        self.will: Will | None = None
        self.window: FlowWindow | None = None
        self.budget: Bucket | None = None
        self.left = False
        self.ended = False
        self.heard_at = self.moved_at = now
        self.silence_s = 0.0
        self.taken_before = 0
        self.counted_bytes = 0
        self._attention = attention
        self._output_bytes = 0

    @property
    def blocked(self) -> bool:
        """Whether none of its packets may be handled now."""
        if self.congested and (self.rights is None or not self.rights.trusted):
            return True
        return self.window is not None and not self.window.open

    @property
    def unsent_bytes(self) -> int:
        """All bytes that wait for the client to take them."""
        return self.unsent() + self._output_bytes

    def write(self, packet: bytes) -> None:
        """Add a packet to the output."""
        self.output.append(packet)
        self._output_bytes += len(packet)
        self._attention[self] = None

    def write_message(self, head: bytes, payload: bytes) -> None:
        """Add a PUBLISH to the output."""
        if len(payload) <= _JOINED_BYTES:
            self.output.append(head + payload)
        else:
            self.output += (head, payload)
        self._output_bytes += len(head) + len(payload)
        self._attention[self] = None

    def take_output(self) -> bytes:
        """The bytes to write to the socket now."""
        output = self.output
        data = output[0] if len(output) == 1 else b"".join(output)
        self.output = []
        self._output_bytes = 0
        return data

    def attend(self) -> None:
        """Ask for another look at this connection."""
        self._attention[self] = None

    def close(self, closing: Closing) -> None:
        """End the socket that way."""
        if self.closing is not Closing.NOW:
            self.closing = closing
        self._attention[self] = None
