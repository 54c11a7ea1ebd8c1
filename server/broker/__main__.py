"""The embedded broker as a process of its own: `python -P -m server.broker`.

Orders are JSON lines on its standard input, answers are JSON lines on its standard output:

    {"op": "set", "client_id": ..., "role": ..., "fleet": ..., "credential_sha256": ...}
    {"op": "remove", "client_id": ...}
    {"op": "listen"}                      -> {"port": 1883}, or {"error": "..."} and it exits

An order with a `seq` is answered with {"done": seq} once it is in force. The process ends when its
standard input closes, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import resource
import ssl
import sys
from pathlib import Path
from typing import Any, Final

from amqtt.errors import AMQTTError, ProtocolHandlerError

from edge_sdk.errors import SplitedgeError
from server.broker.connection import AcceptorLimits
from server.broker.embedded import EmbeddedBroker
from server.broker.policy import Principal

_DESCRIPTORS: Final = 65_536
_LINE_BYTES: Final = 65_536

logger = logging.getLogger(__name__)


def main() -> int:
    """Run until standard input closes; the exit status."""
    options = _options()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    # amqtt warns of every bad packet of a client; the acceptor logs it once
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)
    logging.getLogger("transitions").setLevel(logging.CRITICAL)
    _raise_descriptor_limit()
    return asyncio.run(_serve(options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m server.broker", description=__doc__)
    defaults = AcceptorLimits()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--packet-bytes", type=int, default=defaults.payload_bytes)
    parser.add_argument("--certificate", type=Path, help="PEM file; needs --key, serves TLS")
    parser.add_argument("--key", type=Path)
    return parser.parse_args()


def _raise_descriptor_limit() -> None:
    """Allow more sockets, because the usual soft limit of 1,024 is a small fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(options: argparse.Namespace) -> int:
    asyncio.get_running_loop().set_exception_handler(_log_amqtt_less)
    broker = EmbeddedBroker(AcceptorLimits(payload_bytes=options.packet_bytes))
    orders = await _standard_input()
    while line := await orders.readline():
        order = json.loads(line)
        try:
            answer = await _execute(broker, order, options)
        except SplitedgeError as err:
            _write_line({"error": str(err)})
            return 1
        if answer:
            _write_line(answer)
        if "seq" in order:
            _write_line({"done": order["seq"]})
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


def _log_amqtt_less(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors of amqtt's tasks for debugging only: each client that is cut causes some."""
    if isinstance(context.get("exception"), ProtocolHandlerError | AMQTTError):
        logger.debug("%s: %s", context["message"], context["exception"])
    else:
        loop.default_exception_handler(context)


def _tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    if options.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.certificate, options.key)
    return context


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def _write_line(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
