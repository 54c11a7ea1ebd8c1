"""The embedded broker: amqtt 0.12.1 behind our own acceptor, with its faults corrected.

Good for about 500 devices on one machine. MQTT 3.1.1, QoS 0 and 1, clean sessions, no shared
subscriptions; for more, use Mosquitto or EMQX by URL.

The corrections override private methods, so amqtt is pinned to this version. Unchanged, amqtt
sends every retained message to every client that connects, lets wills past the topic filter,
deletes live sessions in its clean-up, drops a message when a subscription changes while it is sent
out, and sets no limit to the messages that wait for a client that does not read.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Final

from amqtt.adapters import StreamWriterAdapter
from amqtt.broker import Broker
from amqtt.contexts import Action
from amqtt.errors import AMQTTError, ProtocolHandlerError

from edge_sdk.errors import ConfigurationError
from server.broker import policy
from server.broker.acceptor import Acceptor
from server.broker.connection import AcceptorLimits, ClientConnection, PacketReader
from server.broker.policy import BACKEND_HEARS, Principal

_LISTENER: Final = "default"
_RETAINED_BYTES: Final = 16_384  # a status is far smaller; every device may leave one
_MAX_QOS: Final = 1

logger = logging.getLogger(__name__)


class EmbeddedBroker:
    """A broker of the running event loop. It refuses every login until a principal is set."""

    def __init__(self, limits: AcceptorLimits | None = None) -> None:
        self._acceptor = Acceptor(self._serve, limits or AcceptorLimits())
        self._broker: PatchedBroker = PatchedBroker(self._acceptor.live)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Start, and return the port: `port`, or the one the system chose for 0.

        Raises: ConfigurationError where the address cannot be used.
        """
        await self._broker.start()
        try:
            return await self._acceptor.listen(host, port, tls)
        except OSError as err:
            raise ConfigurationError(
                f"broker: cannot listen on {host} port {port}: {err.strerror}; choose another port"
            ) from err

    def set_principal(self, principal: Principal) -> None:
        """Let `principal` log in; a change cuts connections made under the old rules."""
        self._acceptor.set_principal(principal)

    def remove_principal(self, client_id: str) -> None:
        """Cut `client_id` at once, refuse it from now on, and drop its retained messages."""
        principal = self._acceptor.remove_principal(client_id)
        if principal is not None:
            self._broker.forget(principal)

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        await self._acceptor.close()
        await self._broker.shutdown()

    async def _serve(
        self, connection: ClientConnection, reader: PacketReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await self._broker.external_connected(reader, StreamWriterAdapter(writer), _LISTENER)
        finally:
            await self._broker.end_session(connection.client_id)
            if not self._acceptor.knows(connection.principal):
                self._broker.forget(connection.principal)  # the will that it left when it was cut


class PatchedBroker(Broker):  # type: ignore[misc]  # amqtt ships no types
    """amqtt's broker with our own routing, retention and end of sessions.

    Args:
        live: the acceptor's table of connections, by client id.
    """

    def __init__(self, live: Mapping[str, ClientConnection]) -> None:
        super().__init__({"listeners": {_LISTENER: {"type": "external"}}, "plugins": {}})
        self._live = live
        self._deliveries: set[asyncio.Task[None]] = set()

    def forget(self, principal: Principal) -> None:
        """Drop the retained messages of that device."""
        for topic in [*self._retained_messages] if principal.role == "device" else ():
            if policy.may_publish(principal, topic):
                del self._retained_messages[topic]

    async def end_session(self, client_id: str) -> None:
        """Drop the session of a connection that has ended; every session is a clean session."""
        await self._delete_session(client_id)

    async def _session_monitor(self) -> None:
        """Do nothing: amqtt's own deletes by client id after a wait, maybe a newer session."""

    async def _authenticate(self, session: Any, _: Any) -> bool:
        """Whether this is the connection that the acceptor let in."""
        return session.client_id in self._live

    async def _topic_filtering(self, session: Any, topic: str, action: Action) -> bool:
        connection = self._live.get(session.client_id)
        if connection is None:
            return False
        if action == Action.PUBLISH:
            allowed = policy.may_publish(connection.principal, topic)
        else:
            allowed = policy.may_subscribe(connection.principal, topic)
        if not allowed:
            connection.refuse(str(action), topic)
        return allowed

    async def add_subscription(self, subscription: tuple[str, int], session: Any) -> int:
        topic_filter, qos = subscription
        if topic_filter.startswith(policy.SHARED_PREFIX):
            logger.warning(
                "client=%s asked for a shared subscription: the embedded broker has none; "
                "use Mosquitto or EMQX for more than one backend",
                session.client_id,
            )
        granted: int = await super().add_subscription((topic_filter, min(qos, _MAX_QOS)), session)
        return granted

    async def _client_message_loop(self, session: Any, handler: Any) -> None:
        """Serve a client until it ends; then route its last messages, and then its will.

        amqtt's own sends the will first and drops messages that came just before the end. It waits
        for an event that it creates after the reader has started, and so misses a client that had
        left by then. The reader's own end is never missed.
        """
        connection = self._live[session.client_id]
        serving = [
            asyncio.create_task(self._follow_subscriptions(session, handler)),
            asyncio.create_task(self._follow_unsubscriptions(session, handler)),
            asyncio.create_task(self._follow_messages(session)),
        ]
        stopped = handler._reader_stopped  # noqa: SLF001 - no public name tells it
        ended = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait([ended, *serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ended, *serving):
                task.cancel()
            results = await asyncio.gather(ended, *serving, return_exceptions=True)
        for failure in results:
            if isinstance(failure, Exception):
                logger.error("client=%s failed", session.client_id, exc_info=failure)
        while not session.delivered_message_queue.empty():
            await self._route(session, session.delivered_message_queue.get_nowait())
        if session.will_flag and not connection.left:
            will = session.will_topic, session.will_message, session.will_qos
            await self._broadcast_message(session, *will)
            if session.will_retain:
                await self.retain_message(session, *will)
        await self._stop_handler(handler)
        session.transitions.disconnect()

    async def _follow_subscriptions(self, session: Any, handler: Any) -> None:
        while True:
            await self._handle_subscription(
                session, handler, await _done(handler.get_next_pending_subscription())
            )

    async def _follow_unsubscriptions(self, session: Any, handler: Any) -> None:
        while True:
            await self._handle_unsubscription(
                session, handler, await _done(handler.get_next_pending_unsubscription())
            )

    async def _follow_messages(self, session: Any) -> None:
        while True:
            await self._route(session, await session.delivered_message_queue.get())

    async def _route(self, session: Any, message: Any) -> None:
        """Send out a client's message, and retain it where asked, if the client may."""
        connection = self._live[session.client_id]
        try:
            if await self._topic_filtering(session, message.topic, Action.PUBLISH):
                await self._broadcast_message(session, message.topic, message.data)
                if message.publish_packet.retain_flag:
                    await self.retain_message(session, message.topic, message.data, message.qos)
        finally:
            if connection.inbound is not None:
                connection.inbound.give(_size(message.publish_packet))

    async def _broadcast_message(
        self, session: Any, topic: str, data: bytes, force_qos: int | None = None
    ) -> None:
        """Send a message to its subscribers, without amqtt's one unbounded queue for all.

        A message under way is counted twice: for the sender, which is not read from while its
        window is full, and for the receiver, which is cut when its window is full.
        """
        sender = self._live.get(session.client_id)
        for target, granted in list(self._subscribers(topic)):
            qos = granted if force_qos is None else min(granted, force_qos)
            self._send(sender, target, topic, data, qos, retain=False)

    def _send(
        self,
        sender: ClientConnection | None,
        target: Any,
        topic: str,
        data: bytes,
        qos: int,
        *,
        retain: bool,
    ) -> None:
        receiver = self._live.get(target.client_id)
        _, handler = self._sessions.get(target.client_id, (None, None))
        if receiver is None or handler is None or not self._has_room(receiver):
            return
        publish = handler.mqtt_publish(topic, data, qos, retain=retain)
        task = asyncio.create_task(self._deliver(sender, receiver, publish, len(data)))
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    def _subscribers(self, topic: str) -> Iterator[tuple[Any, int]]:
        """(session, granted QoS) of each match; the policy allows these filters and no others."""
        yield from self._subscriptions.get(topic, ())
        for topic_filter in BACKEND_HEARS:
            if self._matches(topic, topic_filter):
                yield from self._subscriptions.get(topic_filter, ())

    @staticmethod
    def _has_room(receiver: ClientConnection) -> bool:
        if receiver.outbound.open:
            return True
        if receiver.principal.role == "device":
            receiver.cut("does not read its messages")
            return False
        return True  # for a backend the senders are held back instead

    @staticmethod
    async def _deliver(
        sender: ClientConnection | None,
        receiver: ClientConnection,
        publish: Coroutine[Any, Any, Any],
        size_bytes: int,
    ) -> None:
        inbound = sender.inbound if sender is not None else None
        windows = [window for window in (inbound, receiver.outbound) if window is not None]
        for window in windows:
            window.take(size_bytes)
        try:
            await publish
        except (
            AMQTTError,
            ProtocolHandlerError,
            OSError,
        ) as err:  # TimeoutError, when unacknowledged, is an OSError
            logger.debug("client=%s not delivered: %s", receiver.client_id, err)
        finally:
            for window in windows:
                window.give(size_bytes)

    async def retain_message(
        self, source_session: Any, topic_name: str, data: bytes, qos: int | None = None
    ) -> None:
        connection = self._live.get(source_session.client_id)
        if connection is None or not policy.may_retain(connection.principal, topic_name):
            return
        if len(data) <= _RETAINED_BYTES:
            await super().retain_message(source_session, topic_name, data, qos)

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Any
    ) -> None:
        """Send retained messages to a session that holds the filter, and to no other.

        amqtt calls this for every filter of the broker whenever a client connects. Its own version
        stops the client's other messages until each retained one is acknowledged.
        """
        topic_filter, qos = subscription
        holders = self._subscriptions.get(topic_filter, ())
        if not any(holder.client_id == session.client_id for holder, _ in holders):
            return
        for topic, kept in list(self._retained_messages.items()):
            if self._matches(topic, topic_filter):
                granted = min(qos, kept.qos, _MAX_QOS)
                self._send(None, session, topic, kept.data, granted, retain=True)


async def _done(waited_for: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A finished task, as amqtt's handlers take it."""
    task = asyncio.create_task(waited_for)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
    return task


def _size(publish: Any) -> int:
    """Length of a PUBLISH packet's body, as the reader counted it."""
    size: int = publish.fixed_header.remaining_length
    return size
