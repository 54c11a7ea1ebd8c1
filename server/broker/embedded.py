"""The embedded broker: amqtt 0.12.1 behind our own door, with its faults mended.

Good for about 500 devices on one machine. MQTT 3.1.1, QoS 0 and 1, clean sessions, no shared
subscriptions; for more, use Mosquitto or EMQX by URL.

The mends are overrides of private methods, so amqtt is pinned to this very version. Stock amqtt
sends every retained message to everyone who connects, lets wills past the topic filter, deletes
live sessions in its clean-up, drops a message when a subscription changes while it is sent out,
and never limits what waits for a client that does not read.
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
from amqtt.errors import AMQTTError

from edge_sdk.errors import ConfigurationError
from server.broker import policy
from server.broker.acceptor import Acceptor, AcceptorLimits, Connection, PacketReader
from server.broker.policy import BACKEND_HEARS, Principal

_LISTENER: Final = "default"
_RETAINED_BYTES: Final = 16_384  # a status with room to spare: every device may leave one
_MAX_QOS: Final = 1

logger = logging.getLogger(__name__)


class EmbeddedBroker:
    """A broker of this process's event loop. Nobody may log in until a principal is set."""

    def __init__(self, limits: AcceptorLimits | None = None) -> None:
        self._acceptor = Acceptor(self._serve, limits or AcceptorLimits())
        self._broker: MendedBroker = MendedBroker(self._acceptor.live)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Start, and return the port: `port`, or the one the system chose for 0.

        Raises: ConfigurationError where the address cannot be had.
        """
        await self._broker.start()
        try:
            return await self._acceptor.listen(host, port, tls)
        except OSError as err:
            raise ConfigurationError(
                f"broker: cannot listen on {host} port {port}: {err.strerror}; choose another port"
            ) from err

    def set_principal(self, principal: Principal) -> None:
        """Let `principal` log in; a change cuts whoever is connected under the old rules."""
        self._acceptor.set_principal(principal)

    def remove_principal(self, client_id: str) -> None:
        """Cut `client_id` at once, let it in no more, and forget what it retained."""
        principal = self._acceptor.remove_principal(client_id)
        if principal is not None:
            self._broker.forget(principal)

    async def close(self) -> None:
        """Stop listening and cut everybody."""
        await self._acceptor.close()
        await self._broker.shutdown()

    async def _serve(
        self, connection: Connection, reader: PacketReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await self._broker.external_connected(reader, StreamWriterAdapter(writer), _LISTENER)
        finally:
            await self._broker.end_session(connection.client_id)
            if not self._acceptor.knows(connection.principal):
                self._broker.forget(connection.principal)  # the will it left when it was cut


class MendedBroker(Broker):  # type: ignore[misc]  # amqtt ships no types
    """amqtt's broker with routing, retention and session ends of our own.

    Args:
        live: the acceptor's table of connections, by client id.
    """

    def __init__(self, live: Mapping[str, Connection]) -> None:
        super().__init__({"listeners": {_LISTENER: {"type": "external"}}, "plugins": {}})
        self._live = live
        self._deliveries: set[asyncio.Task[None]] = set()

    def forget(self, principal: Principal) -> None:
        """Drop what that device retained."""
        for topic in [*self._retained_messages] if principal.role == "device" else ():
            if policy.may_publish(principal, topic):
                del self._retained_messages[topic]

    async def end_session(self, client_id: str) -> None:
        """Drop the session of a connection that has ended; every session is a clean one."""
        await self._delete_session(client_id)

    async def _session_monitor(self) -> None:
        """Nothing: amqtt's deletes by client id after a wait, which can hit a newer session."""

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

    async def _handle_message_delivery(self, session: Any, handler: Any, waiter: Any) -> bool:
        message = waiter.result()
        try:
            going_on: bool = await super()._handle_message_delivery(session, handler, waiter)
            return going_on
        finally:
            connection = self._live.get(session.client_id)
            if message is not None and connection is not None and connection.said is not None:
                connection.said.give(_size(message.publish_packet))

    async def _broadcast_message(
        self, session: Any, topic: str, data: bytes, force_qos: int | None = None
    ) -> None:
        """Send a message out to those subscribed, without amqtt's one unbounded queue for all.

        What waits is counted twice: for the sender, who is not read from while too much of it is
        under way, and for the receiver, which is cut when too much waits for it.
        """
        sender = self._live.get(session.client_id)
        for target, granted in list(self._subscribers(topic)):
            receiver = self._live.get(target.client_id)
            _, handler = self._sessions.get(target.client_id, (None, None))
            if receiver is None or handler is None or not self._has_room(receiver):
                continue
            qos = granted if force_qos is None else min(granted, force_qos)
            publish = handler.mqtt_publish(topic, data, qos, retain=False)
            task = asyncio.create_task(self._deliver(sender, receiver, publish, len(data)))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    def _subscribers(self, topic: str) -> Iterator[tuple[Any, int]]:
        """(session, granted QoS) of each match; the policy leaves these filters and no others."""
        yield from self._subscriptions.get(topic, ())
        for topic_filter in BACKEND_HEARS:
            if self._matches(topic, topic_filter):
                yield from self._subscriptions.get(topic_filter, ())

    @staticmethod
    def _has_room(receiver: Connection) -> bool:
        if receiver.owed.open:
            return True
        if receiver.principal.role == "device":
            receiver.cut("does not take what is sent to it")
            return False
        return True  # for a backend the senders are held back instead

    @staticmethod
    async def _deliver(
        sender: Connection | None,
        receiver: Connection,
        publish: Coroutine[Any, Any, Any],
        size_bytes: int,
    ) -> None:
        said = sender.said if sender is not None else None
        windows = [window for window in (said, receiver.owed) if window is not None]
        for window in windows:
            window.take(size_bytes)
        try:
            await publish
        except (AMQTTError, OSError) as err:  # TimeoutError, when unacknowledged, is an OSError
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
        """Send what is retained to a session that holds the filter, and to no other.

        amqtt calls this for every filter of the broker whenever somebody connects.
        """
        holders = self._subscriptions.get(subscription[0], ())
        if any(holder.client_id == session.client_id for holder, _ in holders):
            await super()._publish_retained_messages_for_subscription(subscription, session)


def _size(publish: Any) -> int:
    """The length of a PUBLISH packet's body, as the reader counted it."""
    size: int = publish.fixed_header.remaining_length
    return size
