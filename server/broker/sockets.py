"""The sockets of the embedded broker: logins under way, handshakes, and the sweep."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import ssl
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Final

from server.broker.channel import Channel, TlsChannel
from server.broker.core.broker import Broker
from server.broker.core.connection import Connection
from server.broker.core.limits import BrokerLimits
from server.listening.acceptor import Acceptor
from server.listening.direct_loop import DirectLoop
from server.listening.source import source_network

_ACCEPTS: Final = 4  # sockets accepted in a turn of the event loop
_BUFFER_BYTES: Final = 65_536
_SWEEP_S: Final = 1.0
_END_S: Final = 2.0
_CLOSE_S: Final = 5.0  # for the last bytes of a socket that closes

logger = logging.getLogger(__name__)


class Lobby:
    """Channels that have not logged in yet, and which of them gives way to a newcomer.

    In the middle of a TLS handshake a channel has cost the processor a millisecond, so it gives way
    only after a silence. Where thousands of devices come back at one time, each newcomer would else
    undo the work for another one, and nobody gets in.

    Args:
        handshake_s: silence after which one gives way that has begun a handshake.
    """

    def __init__(self, handshake_s: float) -> None:
        self._handshake_s = handshake_s
        # the first of each has been silent for longest
        self._waiting: OrderedDict[Channel, None] = OrderedDict()
        self._handshakes: OrderedDict[Channel, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._handshakes)

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._waiting or channel in self._handshakes

    def __iter__(self) -> Iterator[Channel]:
        return itertools.chain(self._waiting, self._handshakes)

    def enter(self, channel: Channel) -> None:
        """Add one that has said nothing yet."""
        self._waiting[channel] = None

    def heard(self, channel: Channel, now: float) -> None:
        """Note that it has said something, or was answered."""
        if channel in self._waiting:
            self._waiting.move_to_end(channel)
        else:
            self.shakes_hands(channel, now)

    def shakes_hands(self, channel: Channel, now: float) -> None:
        """Note that it has begun a handshake, or goes on with it."""
        self._waiting.pop(channel, None)
        self._handshakes[channel] = now
        self._handshakes.move_to_end(channel)

    def leave(self, channel: Channel) -> None:
        """Remove one that has logged in, or was cut."""
        self._waiting.pop(channel, None)
        self._handshakes.pop(channel, None)

    def most_silent(self, now: float) -> Channel | None:
        """The one that gives way; None while all are at work, and a newcomer has to come again."""
        for channel in self._waiting:
            return channel
        for channel, heard_at in self._handshakes.items():
            if now - heard_at < self._handshake_s:
                return None  # the others were heard later
            if not channel.busy:
                return channel
        return None


class Sockets:
    """Sockets between the network and the core.

    Attributes:
        core: the broker.
        loop: the running event loop, from `listen` on; a DirectLoop.
        time: clock of the core, in seconds.
        buffer, plain: what all sockets read into, and what TLS decrypts into.
    """

    def __init__(self, core: Broker, limits: BrokerLimits) -> None:
        self.core = core
        self.time: Callable[[], float] = time.monotonic
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.plain = memoryview(bytearray(_BUFFER_BYTES))
        self._limits = limits
        self._acceptors: list[Acceptor] = []
        self._tls: ssl.SSLContext | None = None
        self._channels: dict[Channel, None] = {}
        self._of: dict[Connection, Channel] = {}
        self._lobby = Lobby(limits.handshake_s)
        self._by_source: dict[str, Lobby] = {}
        self._handshakes: deque[TlsChannel] = deque()
        self._sweeper: asyncio.Task[None] | None = None
        self._settling = False
        self._all_gone = asyncio.Event()

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Accept connections from now on, and return the port; the system chooses one for 0.

        Raises: OSError where the address cannot be used.
        """
        loop = asyncio.get_running_loop()
        assert isinstance(loop, DirectLoop), "run the broker on a DirectLoop"
        self.loop = loop
        self._tls = tls
        found = await self.loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with contextlib.ExitStack() as on_failure:
            listeners = []
            for family, *_, address in dict.fromkeys(found):
                listener = socket.create_server((address[0], port), family=family)
                on_failure.callback(listener.close)
                listeners.append(listener)
                port = listener.getsockname()[1]
            on_failure.pop_all()
        self._acceptors = [
            Acceptor(listener, self._enter, turn=_ACCEPTS, failed=self._make_room)
            for listener in listeners
        ]
        self._sweeper = self.loop.create_task(self._sweep())
        return port

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        for acceptor in self._acceptors:
            acceptor.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for channel in list(self._channels):
            channel.abort()
        if self._channels:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), _END_S)

    # --- what a channel calls ---------------------------------------------------------------

    def opened(
        self, channel: Channel, unsent: Callable[[], int], written: Callable[[], int]
    ) -> Connection:
        """The core's connection of a new channel."""
        connection = self.core.opened(channel.address, self.time(), unsent, written)
        self._of[connection] = channel
        return connection

    def logged_in(self, channel: Channel) -> None:
        """Count a channel no longer among those that have not logged in."""
        if channel not in self._lobby:
            return
        self._lobby.leave(channel)
        same = self._by_source[channel.source]
        same.leave(channel)
        if not len(same):
            del self._by_source[channel.source]

    def heard(self, channel: Channel) -> None:
        """Note that a channel without a login has said something, or was answered."""
        if channel in self._lobby:
            now = self.time()
            self._lobby.heard(channel, now)
            self._by_source[channel.source].heard(channel, now)

    def forget(self, channel: Channel) -> None:
        """Forget a channel whose socket has ended."""
        self.logged_in(channel)
        self._channels.pop(channel, None)
        self._of.pop(channel.connection, None)
        if not self._channels:
            self._all_gone.set()

    def queue_handshake(self, channel: TlsChannel) -> None:
        """Let a handshake go on when it is its turn: each takes a millisecond of the processor."""
        if channel in self._lobby:
            now = self.time()
            self._lobby.shakes_hands(channel, now)
            self._by_source[channel.source].shakes_hands(channel, now)
        self._handshakes.append(channel)
        if len(self._handshakes) == 1:
            self.loop.call_soon(self._shake_hands)

    def settle(self) -> None:
        """Look at every connection that the core changed."""
        if self._settling:
            return
        self._settling = True
        try:
            while changed := self.core.attention():
                for connection in changed:
                    channel = self._of.get(connection)
                    if channel is not None:
                        self._attend(connection, channel)
        finally:
            self._settling = False

    def _attend(self, connection: Connection, channel: Channel) -> None:
        try:
            channel.attend()
        except Exception as err:  # noqa: BLE001 - outermost loop of a connection: a fault ends this one alone
            del self._of[connection]  # nothing is written there any more
            channel.failed(err)

    # --- sockets ----------------------------------------------------------------------------

    def _enter(self, accepted: socket.socket, address: str) -> None:
        """Make a channel of a socket, in place of a silent one where there are too many."""
        # without it, two small packets in a row wait 40 ms for an acknowledgement of TCP
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        now = self.time()
        same = self._by_source.get(source_network(address))
        if same is not None and len(same) >= self._limits.logins_per_address:
            has_place = self._cut(same.most_silent(now))
        elif len(self._lobby) >= self._limits.logins:
            has_place = self._cut(self._lobby.most_silent(now))
        else:
            has_place = True
        if has_place and len(self._channels) >= self._limits.connections:
            has_place = self._cut(self._lobby.most_silent(now))
        if not has_place:
            accepted.close()
            return
        channel = (
            Channel(self, accepted, address, now)
            if self._tls is None
            else TlsChannel(self, accepted, address, now, self._tls)
        )
        self._channels[channel] = None
        self._all_gone.clear()
        self._lobby.enter(channel)
        self._by_source.setdefault(channel.source, Lobby(self._limits.handshake_s)).enter(channel)

    def _make_room(self) -> None:
        """Free a descriptor, if anyone who has not logged in is silent."""
        self._cut(self._lobby.most_silent(self.time()))

    def _cut(self, channel: Channel | None) -> bool:
        """Cut a channel that has not logged in; whether there is one."""
        if channel is None:
            return False
        self.logged_in(channel)  # its place is free now, its socket in a moment
        channel.abort()
        return True

    def _shake_hands(self) -> None:
        for _ in range(min(self._limits.handshakes_per_turn, len(self._handshakes))):
            channel = self._handshakes.popleft()
            try:
                channel.shake_hands()
            except Exception as err:  # noqa: BLE001 - outermost loop of a connection, as above
                channel.failed(err)
        if self._handshakes:
            self.loop.call_soon(self._shake_hands)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self._sweep_once(self.time())
            except Exception:
                # a broker that sweeps no more would keep silent sockets for ever
                logger.exception("sweep over the sockets failed; the next one follows")

    def _sweep_once(self, now: float) -> None:
        """Cut those that are overdue."""
        for channel in list(self._lobby):
            if now - channel.opened_at >= self._limits.connect_s:
                channel.abort()
        for channel in list(self._channels):
            if channel.closing_at and now - channel.closing_at > _CLOSE_S:
                channel.abort()
        for connection, channel in list(self._of.items()):
            try:
                self.core.check_pulse(connection, now)
            except Exception as err:  # noqa: BLE001 - outermost loop of a connection, as above
                channel.failed(err)
        self.core.tick(now)
        self.settle()
