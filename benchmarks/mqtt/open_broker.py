"""The embedded broker with every right for everybody: for tests of MQTT itself, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from server.broker.core.broker import Broker, Event
from server.broker.core.limits import BrokerLimits
from server.broker.core.packets import Connect
from server.broker.sockets import Sockets
from server.listening.direct_loop import DirectLoop


@dataclass(frozen=True, slots=True)
class AllRights:
    """The rights of a client that may do everything."""

    name: str
    trusted: bool = False
    held_back: bool = False

    def may_publish(self, topic: str) -> bool:  # noqa: ARG002 - the protocol's signature
        """Allow it."""
        return True

    def may_subscribe(self, topic_filter: str) -> bool:  # noqa: ARG002 - as above
        """Allow it."""
        return True

    def may_retain(self, topic: str) -> bool:  # noqa: ARG002 - as above
        """Allow it."""
        return True


def let_everybody_in(connect: Connect) -> AllRights:
    """All rights, for any name and password."""
    return AllRights(connect.client_id)


@contextlib.contextmanager
def open_broker(
    limits: BrokerLimits | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Run the broker in a thread of its own; its port on loopback."""
    listening: queue.SimpleQueue[int] = queue.SimpleQueue()
    over = asyncio.Event()
    loop = DirectLoop()

    async def serve() -> None:
        bounds = limits or BrokerLimits()
        sockets = Sockets(Broker(let_everybody_in, bounds, _pass_over), bounds)
        listening.put(await sockets.listen("127.0.0.1", 0, tls))
        await over.wait()
        await sockets.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield listening.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def _pass_over(event: Event) -> None:
    """Tell nobody."""
