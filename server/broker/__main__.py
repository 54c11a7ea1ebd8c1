"""The embedded broker as a process of its own: `python -P -m server.broker`.

Orders are JSON lines on its standard input, answers are JSON lines on its standard output:

    {"op": "set", "client_id": ..., "role": ..., "fleet": ..., "credential_sha256": ...}
    {"op": "remove", "client_id": ...}
    {"op": "listen"}                      -> {"port": 1883}, or {"error": "..."} and it exits

What happens to clients is told by lines of their own, at most EVENTS_PER_S of them:

    {"event": "login", "client_id": ..., "peer": ..., "why": ...}    or refused, swapped, ...
    {"event": "left_out", "count": ...}                               for those above the limit

An order with a `seq` is answered with {"done": seq} once it is in force. The process ends when its
standard input closes, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import ssl
import sys
from pathlib import Path
from typing import Any, Final

from edge_sdk.errors import SplitedgeError
from edge_sdk.logs.line_format import CHILD_FORM, log_to_stderr
from server.broker.core.limits import BrokerLimits
from server.broker.embedded import EmbeddedBroker
from server.broker.policy import Principal
from server.listening.descriptors import raise_descriptor_limit
from server.listening.direct_loop import DirectLoop

_OWN_DESCRIPTORS: Final = 64  # pipes, listeners, the event loop's own
_LINE_BYTES: Final = 65_536
_UNREAD_BYTES: Final = 65_536
EVENTS_PER_S: Final = 200

logger = logging.getLogger(__name__)


def main() -> int:
    """Run until standard input closes; the exit status."""
    options = _options()
    log_to_stderr(logging.INFO, CHILD_FORM)
    with asyncio.Runner(loop_factory=DirectLoop) as runner:
        return runner.run(_serve(options, raise_descriptor_limit()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m server.broker", description=__doc__)
    defaults = BrokerLimits()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--packet-bytes", type=int, default=defaults.payload_bytes)
    parser.add_argument("--certificate", type=Path, help="PEM file; needs --key, serves TLS")
    parser.add_argument("--key", type=Path)
    return parser.parse_args()


async def _serve(options: argparse.Namespace, descriptors: int) -> int:
    answers = await _Answers.open()
    limits = BrokerLimits(
        payload_bytes=options.packet_bytes, connections=descriptors - _OWN_DESCRIPTORS
    )
    broker = EmbeddedBroker(limits, EventLines(answers).write)
    orders = await _standard_input()
    while line := await orders.readline():
        order = json.loads(line)
        try:
            answer = await _execute(broker, order, options)
        except SplitedgeError as err:
            answers.write({"error": str(err)})
            return 1
        if answer:
            answers.write(answer)
        if "seq" in order:
            answers.write({"done": order["seq"]})
    with contextlib.suppress(asyncio.CancelledError):
        await broker.close()
    return 0


async def _execute(
    broker: EmbeddedBroker, order: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any] | None:
    match order["op"]:
        case "set":
            broker.set_principal(
                Principal(
                    order["client_id"], order["role"], order["fleet"], order["credential_sha256"]
                )
            )
        case "remove":
            broker.remove_principal(order["client_id"])
        case "listen":
            tls = _tls(options)
            return {"port": await broker.listen(options.host, options.port, tls)}
    return None


def _tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    if options.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.certificate, options.key)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # they cost memory, and a device that stays seldom logs in
    return context


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


class _Answers:
    """Standard output, written without waiting for the parent to read it."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    @classmethod
    async def open(cls) -> _Answers:
        transport, _ = await asyncio.get_running_loop().connect_write_pipe(
            asyncio.BaseProtocol, sys.stdout
        )
        return cls(transport)

    def write(self, answer: dict[str, Any]) -> None:
        """Write a line."""
        self._transport.write(json.dumps(answer).encode() + b"\n")

    @property
    def unread(self) -> bool:
        """Whether the parent leaves many lines unread."""
        return self._transport.get_write_buffer_size() > _UNREAD_BYTES


class EventLines:
    """Writes events as lines, at most EVENTS_PER_S; the rest are counted in one more line.

    So a flood of refusals costs neither the broker nor its parent much.
    """

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._left = EVENTS_PER_S
        self._left_out = 0
        self._counting = False

    def write(self, event: dict[str, Any]) -> None:
        """Write an event, or count it."""
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_later(1.0, self._end_second)
        if self._left > 0 and not self._answers.unread:
            self._left -= 1
            self._answers.write(event)
        else:
            self._left_out += 1

    def _end_second(self) -> None:
        self._left, self._counting = EVENTS_PER_S, False
        if self._left_out and not self._answers.unread:
            self._answers.write({"event": "left_out", "count": self._left_out})
            self._left_out = 0


if __name__ == "__main__":
    sys.exit(main())
