"""The embedded broker's core: bytes of clients in, bytes to clients out. Pure: no I/O, no clock.

MQTT 3.1.1 with QoS 0 to 2, wills, retained messages and kept sessions, each within bounds. The
owner of the sockets calls `opened`, `receive`, `work`, `closed` and `tick`, and after each of them
looks at the connections in `attention()`: it writes their output and ends those that are closing.
Times are seconds of a clock that never goes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from edge_sdk.errors import FrameError, FrameTooLargeError, shown
from server.broker.core import packets
from server.broker.core.connection import Closing, Connection
from server.broker.core.limits import BrokerLimits, Bucket, FlowWindow
from server.broker.core.packets import Connect, Header, PacketType, ReturnCode
from server.broker.core.retained import RetainedMessages
from server.broker.core.rights import Authenticate, Refusal, Rights
from server.broker.core.session import Message, Session
from server.broker.core.subscriptions import SHARED_PREFIX, Subscriptions

HELD: Final = math.inf
_COST_BYTES: Final = 4_096  # so many bytes of a packet cost as much as a packet
_LAST_PACKETS: Final = 1_024  # of a connection that has ended: those of an honest client, and more
_LARGE_BYTES: Final = 65_536  # a packet of this size counts as partial while it comes in

# names of this module, because the types of packets are compared for each of them
_CONNECT: Final = PacketType.CONNECT
_PUBLISH: Final = PacketType.PUBLISH
_PUBACK: Final = PacketType.PUBACK
_OPEN: Final = Closing.NOT

EventKind = Literal["login", "refused", "swapped", "denied", "cut"]


class Event(NamedTuple):
    """News of a client, for the log: logged in, refused at login (`swapped`: with a credential of
    another), denied a topic, cut.
    """

    kind: EventKind
    client_id: str
    peer: str
    why: str


class Broker:
    """Sessions, subscriptions and retained messages of all clients.

    Args:
        authenticate: the rights of a client that logs in, or why it is refused.
        observe: called with each event.
    """

    def __init__(
        self, authenticate: Authenticate, limits: BrokerLimits, observe: Callable[[Event], None]
    ) -> None:
        self._authenticate = authenticate
        self._limits = limits
        self._observe = observe
        self._connections: dict[Connection, None] = {}
        self._attention: dict[Connection, None] = {}
        self._overflowed: dict[Connection, str] = {}
        self._sessions: dict[str, Session] = {}
        self._away: dict[Session, None] = {}  # kept sessions, those that left first in front
        self._away_bytes = 0
        self._subscriptions: Subscriptions[Session] = Subscriptions()
        self._retained = RetainedMessages(limits)
        self._logins: dict[str, Bucket] = {}  # by name
        self._fleet_window = FlowWindow(
            limits.fleet_inbound_messages, limits.fleet_inbound_bytes, self._attend_held
        )
        # a packet of this length is within the limits, whatever its type is
        self._any_bytes = min(limits.control_bytes, limits.packet_bytes)
        self._packet_bytes = limits.packet_bytes
        self._partial: dict[Connection, None] = {}  # those with a large packet, oldest first
        self._buffered_bytes = 0
        self._anonymous = 0

    # --- what the owner of the sockets calls ------------------------------------------------

    def opened(
        self,
        peer: str,
        now: float,
        unsent: Callable[[], int] = lambda: 0,
        written: Callable[[], int] = lambda: 0,
    ) -> Connection:
        """A new connection.

        Args:
            peer: the client's address, for the log.
            unsent: the bytes that the socket has not sent yet.
            written: all bytes that were written to the socket, those included.
        """
        connection = Connection(peer, unsent, written, self._attention, now)
        self._connections[connection] = None
        return connection

    def receive(self, connection: Connection, data: bytes | memoryview, now: float) -> None:
        """Take bytes of the client; `work` handles them."""
        connection.heard_at = now
        if connection.closing is not Closing.NOT or connection.ended:
            return
        connection.received += data
        if len(connection.received) > _LARGE_BYTES:
            self._count_buffer(connection)
            self._cut_largest(now)

    def work(self, connection: Connection, now: float) -> float | None:
        """Handle packets of the client until it is the others' turn.

        Returns: None when more bytes are needed, so read them. Else do not read, and call again
            after so many seconds; `HELD` is until the connection is in `attention()`.
        """
        wait = self._work(connection, now, self._limits.turn_cost)
        connection.held = wait == HELD
        if connection.counted_bytes:
            self._count_buffer(connection)
        if self._overflowed:
            self._end_overflowed(now)
        return wait

    def closed(self, connection: Connection, now: float) -> None:
        """Note that the socket has ended; what came before its end is still handled."""
        if not connection.ended and connection.rights is not None:
            connection.window = connection.budget = None
            connection.congested = False
            self._work(connection, now, _LAST_PACKETS)
        self._finish(connection, now)
        self._end_overflowed(now)

    def check_pulse(self, connection: Connection, now: float) -> None:
        """Cut a client that is silent or stuck. Call it once a second for each connection."""
        if connection.rights is None or connection.ended:
            return
        unsent, taken = connection.unsent(), connection.written() - connection.unsent()
        if not unsent or taken != connection.taken_before:
            connection.moved_at = now
        connection.taken_before = taken
        if connection.held:
            connection.heard_at = now  # we are not reading, so silence says nothing
        if now - connection.heard_at > connection.silence_s:
            self.cut(connection, f"nothing heard for {connection.silence_s:.1f} s", now)
        elif now - connection.moved_at > self._limits.stall_s:
            why = f"took no byte for {self._limits.stall_s:.0f} s while {unsent} waited"
            self.cut(connection, why, now)

    def tick(self, now: float) -> None:
        """Drop what is too old. Call it once a second."""
        for session in list(self._away):
            if now - session.left_at <= self._limits.kept_session_s:
                break
            self._drop(session)
        for name in [name for name, bucket in self._logins.items() if bucket.full(now)]:
            del self._logins[name]
        self._end_overflowed(now)

    def attention(self) -> list[Connection]:
        """The connections that changed since the last call."""
        changed = list(self._attention)
        self._attention.clear()
        return changed

    def cut(self, connection: Connection, why: str, now: float) -> None:
        """End a connection now."""
        if connection.closing is Closing.NOT and connection.rights is not None:
            self._observe(Event("cut", connection.client_id, connection.peer, why))
        connection.close(Closing.NOW)
        self._finish(connection, now)

    def revoke(self, rights: Rights, why: str, now: float, *, forget: bool) -> None:
        """Cut the clients with these rights and drop their sessions.

        Args:
            forget: drop their retained messages too.
        """
        owners = {
            session.client_id for session in self._sessions.values() if session.rights == rights
        }
        for connection in list(self._connections):
            if connection.rights == rights:
                owners.add(connection.client_id)
                self.cut(connection, why, now)
        for client_id in owners | {rights.name}:
            session = self._sessions.get(client_id)
            if session is not None and session.rights == rights:
                self._drop(session)
            if forget:
                self._retained.forget(client_id)
        self._end_overflowed(now)

    # --- packets ----------------------------------------------------------------------------

    def _work(self, connection: Connection, now: float, cost_left: float) -> float | None:
        """Handle packets up to that cost; returns as `work`."""
        buffer, at, wait = connection.received, 0, None
        budget, before, have = connection.budget, cost_left, len(connection.received)
        # what a turn costs is taken at its end
        paced_s = 0.0 if budget is None else budget.wait_s(now)
        try:
            while connection.closing is _OPEN and not connection.ended:
                if connection.blocked:
                    wait = HELD
                    break
                if paced_s or cost_left <= 0:
                    wait = paced_s
                    break
                if at == have or (header := packets.parse_header(buffer, at)) is None:
                    break
                kind, flags, size, length = header
                if size + length > self._any_bytes or connection.rights is None or kind is _CONNECT:
                    self._check_length(connection, header)
                if have - at < size + length:
                    break
                begin, at = at + size, at + size + length
                body = bytes(memoryview(buffer)[begin:at])
                cost_left -= 1 + length // _COST_BYTES
                cost_left -= self._handle(connection, kind, flags, body, now)
        except FrameError as err:
            self.cut(connection, str(err), now)
        if budget is not None:
            budget.take(before - cost_left, now)
        if at:
            del buffer[:at]
        return wait

    def _check_length(self, connection: Connection, header: Header) -> None:
        kind, _, size, length = header
        if connection.rights is None:
            if kind is not _CONNECT:
                raise FrameError("login: expected a CONNECT packet")
            at_most = self._limits.connect_bytes
        elif kind is _CONNECT:
            raise FrameError("packet: a second CONNECT")
        elif kind is _PUBLISH:
            at_most = self._packet_bytes
        else:
            at_most = self._limits.control_bytes
        if size + length > at_most:
            raise FrameTooLargeError(f"{kind.name}: at most {at_most} bytes, got {size + length}")

    def _handle(
        self, connection: Connection, kind: PacketType, flags: int, body: bytes, now: float
    ) -> int:
        """Handle one packet; returns what it costs beyond its bytes."""
        if kind is _CONNECT:
            self._connect(connection, body, now)
            return 0
        session = self._sessions[connection.client_id]
        if kind is _PUBLISH:
            self._publish(connection, session, packets.parse_publish(flags, body))
        elif kind is _PUBACK:
            session.taken(packets.parse_packet_id(kind, body))
        elif kind in (PacketType.PUBREC, PacketType.PUBCOMP):
            session.acknowledged(kind, packets.parse_packet_id(kind, body))
        elif kind is PacketType.PUBREL:
            packet_id = packets.parse_packet_id(kind, body)
            session.exchanges.discard(packet_id)
            connection.write(packets.acknowledgement(PacketType.PUBCOMP, packet_id))
        elif kind is PacketType.PINGREQ:
            connection.write(packets.PINGRESP)
        elif kind is PacketType.SUBSCRIBE:
            return self._subscribe(connection, session, *packets.parse_subscribe(body))
        elif kind is PacketType.UNSUBSCRIBE:
            return self._unsubscribe(connection, session, *packets.parse_unsubscribe(body))
        else:
            connection.left = True
            connection.close(Closing.AFTER_OUTPUT)
            self._finish(connection, now)
        return 0

    # --- logins -----------------------------------------------------------------------------

    def _connect(self, connection: Connection, body: bytes, now: float) -> None:
        if packets.connect_level(body) != packets.LEVEL:
            self._refuse(connection, ReturnCode.WRONG_LEVEL)
            return
        self._login(connection, packets.parse_connect(body), now)

    def _login(self, connection: Connection, connect: Connect, now: float) -> None:
        """Let the client in or refuse it."""
        rights = self._authenticate(connect)
        if isinstance(rights, Refusal):
            kind: EventKind = "swapped" if rights.swapped else "refused"
            self._observe(Event(kind, rights.client_id, connection.peer, rights.why))
            self._refuse(connection, ReturnCode.NOT_AUTHORISED)
            return
        if connect.will is not None and not rights.may_publish(connect.will.topic):
            why = "its will is on a topic that it may not publish to"
            self._observe(Event("refused", connect.client_id, connection.peer, why))
            self._refuse(connection, ReturnCode.NOT_AUTHORISED)
            return
        bucket = self._logins.get(rights.name)
        if bucket is None:
            bucket = Bucket(self._limits.logins_per_s, self._limits.login_burst, now)
            self._logins[rights.name] = bucket
        if not bucket.take_if_there(now):
            self._observe(Event("refused", connect.client_id, connection.peer, "too many logins"))
            self._refuse(connection, ReturnCode.UNAVAILABLE)
            return
        if not connect.client_id and not connect.clean_session:  # 3.1.3.1
            self._refuse(connection, ReturnCode.CLIENT_ID_REFUSED)
            return
        self._admit(connection, connect, rights, now)

    def _refuse(self, connection: Connection, code: ReturnCode) -> None:
        connection.write(packets.connack(code))
        connection.close(Closing.AFTER_OUTPUT)

    def _admit(self, connection: Connection, connect: Connect, rights: Rights, now: float) -> None:
        limits = self._limits
        client_id = connect.client_id or self._invented_id()
        session = self._sessions.get(client_id)
        if session is not None and session.connection is not None:
            self.cut(session.connection, "it connected again", now)  # 3.1.4
            session = self._sessions.get(client_id)
        present = session is not None and not connect.clean_session and session.rights == rights
        if session is not None and not present:
            self._drop(session)
            session = None
        if session is None:
            session = Session(client_id, rights, limits, kept=not connect.clean_session)
            self._sessions[client_id] = session
        if session in self._away:
            del self._away[session]
            self._away_bytes -= session.waiting_bytes
        session.rights = rights
        session.came(connection)
        connection.client_id, connection.rights = client_id, rights
        connection.will = connect.will
        asked = connect.keep_alive_s or limits.keep_alive_s
        connection.silence_s = 1.5 * min(asked, limits.keep_alive_s)  # 3.1.2.10
        if rights.held_back:
            connection.window = FlowWindow(
                limits.inbound_messages,
                limits.inbound_bytes,
                connection.attend,
                self._fleet_window,
            )
        if not rights.trusted:
            connection.budget = Bucket(limits.cost_per_s, limits.cost_burst, now)
        connection.write(packets.connack(ReturnCode.ACCEPTED, present=present))
        session.resume()
        self._observe(Event("login", client_id, connection.peer, ""))

    def _invented_id(self) -> str:
        while True:
            self._anonymous += 1
            client_id = f"anonymous-{self._anonymous}"
            if client_id not in self._sessions:
                return client_id

    # --- subscriptions ----------------------------------------------------------------------

    def _subscribe(
        self,
        connection: Connection,
        session: Session,
        packet_id: int,
        asked: list[tuple[str, int]],
    ) -> int:
        codes = [
            qos if self._grant(connection, session, topic_filter, qos) else packets.REFUSED
            for topic_filter, qos in asked
        ]
        connection.write(packets.suback(packet_id, codes))
        cost = len(asked)
        for (topic_filter, qos), code in zip(asked, codes, strict=True):
            if code != packets.REFUSED:
                for message in self._retained.matching(topic_filter):
                    self._send(session, message, min(qos, message.qos), retain=True)
                    cost += 1
        return cost

    def _grant(self, connection: Connection, session: Session, topic_filter: str, qos: int) -> bool:
        if topic_filter.startswith(SHARED_PREFIX):
            why = (
                f"subscribe to {shown(topic_filter)}: the embedded broker has no shared "
                "subscriptions; use Mosquitto or EMQX for more than one backend"
            )
            self._deny(connection, why)
            return False
        assert connection.rights is not None
        if not connection.rights.may_subscribe(topic_filter):
            self._deny(connection, f"subscribe to {shown(topic_filter)}")
            return False
        if topic_filter not in session.subscriptions:
            size = session.subscription_bytes + len(topic_filter)
            if (
                len(session.subscriptions) >= self._limits.subscriptions
                or size > self._limits.subscription_bytes
            ):
                self._deny(connection, "subscribe to more topics")
                return False
            session.subscription_bytes = size
        session.subscriptions[topic_filter] = qos
        self._subscriptions.add(topic_filter, session, qos)
        return True

    def _unsubscribe(
        self, connection: Connection, session: Session, packet_id: int, asked: list[str]
    ) -> int:
        for topic_filter in asked:
            if session.subscriptions.pop(topic_filter, None) is not None:
                session.subscription_bytes -= len(topic_filter)
                self._subscriptions.remove(topic_filter, session)
        connection.write(packets.unsuback(packet_id))
        return len(asked)

    # --- messages ---------------------------------------------------------------------------

    def _publish(self, connection: Connection, session: Session, sent: packets.Publish) -> None:
        new = True
        if sent.qos == 2:
            new = sent.packet_id not in session.exchanges
            if len(session.exchanges) >= self._limits.exchanges and new:
                raise FrameError(f"PUBLISH: {len(session.exchanges)} of QoS 2 are not released")
            session.exchanges.add(sent.packet_id)
        rights = session.rights
        if new and rights.may_publish(sent.topic):
            message = Message(sent.topic, sent.payload, sent.qos, connection.window)
            if sent.retain and rights.may_retain(sent.topic):
                kept = Message(sent.topic, sent.payload, sent.qos)
                self._retained.keep(session.client_id, kept)
            self._route(message)
        elif new:
            self._deny(connection, f"publish to {shown(sent.topic)}")
        # after the message itself: its receiver waits, the sender does not
        if sent.qos == 1:
            connection.write(packets.puback(sent.packet_id))
        elif sent.qos == 2:
            connection.write(packets.acknowledgement(PacketType.PUBREC, sent.packet_id))

    def _route(self, message: Message) -> None:
        """Send a message to its subscribers; it holds its sender's window until they took it."""
        if message.topic[0] == "$":
            return  # no client speaks in the broker's own name (4.7.2)
        if message.window is not None:
            message.window.take(message.size_bytes)
        for session, granted in self._subscriptions.of(message.topic).items():
            self._send(session, message, min(granted, message.qos))
        if not message.waiting and message.window is not None:
            message.window.give(message.size_bytes)

    def _send(self, session: Session, message: Message, qos: int, *, retain: bool = False) -> None:
        """Send a message to one client, if there is room for it."""
        connection = session.connection
        if connection is None:
            self._store(session, message, qos)
        elif self._overflowed and connection in self._overflowed:
            return
        elif qos == 0 and connection.unsent_bytes > self._limits.outbound_bytes:
            if not session.rights.trusted:  # QoS 0 may be dropped
                self._overflowed[connection] = "does not read its messages"
        elif qos and not session.has_room(message.size_bytes):
            self._overflowed[connection] = "does not acknowledge its messages"
        else:
            session.send(message, qos, retain=retain)

    def _store(self, session: Session, message: Message, qos: int) -> None:
        """Keep a message for a client that is away; one at QoS 0 is not kept (3.1.2.4)."""
        room = self._away_bytes + message.size_bytes <= self._limits.kept_bytes
        if qos and room and session.has_room(message.size_bytes):
            session.send(message, qos)
            self._away_bytes += message.size_bytes

    def _deny(self, connection: Connection, what: str) -> None:
        """Report that the client may not do that."""
        self._observe(Event("denied", connection.client_id, connection.peer, what))

    # --- the end of connections and sessions ------------------------------------------------

    def _finish(self, connection: Connection, now: float) -> None:
        """End the client's side of a connection: its session, then its will."""
        if connection.ended:
            return
        connection.ended = True
        self._connections.pop(connection, None)
        self._partial.pop(connection, None)
        self._buffered_bytes -= connection.counted_bytes
        connection.counted_bytes = 0
        connection.received = bytearray()
        session = self._sessions.get(connection.client_id)
        if session is None or session.connection is not connection:
            return
        session.went(now)
        if session.kept:
            self._keep(session)
        else:
            self._drop(session)
        will = connection.will
        if will is not None and not connection.left:
            message = Message(will.topic, will.payload, will.qos)
            if will.retain and session.rights.may_retain(will.topic):
                self._retained.keep(session.client_id, message)
            self._route(message)

    def _keep(self, session: Session) -> None:
        self._away[session] = None
        self._away_bytes += session.waiting_bytes
        while len(self._away) > self._limits.kept_sessions or (
            self._away_bytes > self._limits.kept_bytes
        ):
            self._drop(next(iter(self._away)))

    def _drop(self, session: Session) -> None:
        """Forget a session."""
        if self._sessions.get(session.client_id) is session:
            del self._sessions[session.client_id]
        if session in self._away:
            del self._away[session]
            self._away_bytes -= session.waiting_bytes
        for topic_filter in session.subscriptions:
            self._subscriptions.remove(topic_filter, session)
        session.subscriptions = {}

    def _end_overflowed(self, now: float) -> None:
        """Cut the clients for which too much waits; their wills may fill up others."""
        while self._overflowed:
            connection = next(iter(self._overflowed))
            self.cut(connection, self._overflowed[connection], now)
            del self._overflowed[connection]

    # --- attention and memory ---------------------------------------------------------------

    def _attend_held(self) -> None:
        for connection in self._connections:
            if connection.held:
                self._attention[connection] = None

    def _count_buffer(self, connection: Connection) -> None:
        """Count the bytes of a large packet that is not complete yet."""
        size = len(connection.received)
        if size <= _LARGE_BYTES:
            size = 0
            self._partial.pop(connection, None)
        else:
            self._partial.setdefault(connection)
        self._buffered_bytes += size - connection.counted_bytes
        connection.counted_bytes = size

    def _cut_largest(self, now: float) -> None:
        """Cut the client whose packet takes longest, while too many large ones are under way."""
        while self._buffered_bytes > self._limits.partial_bytes and self._partial:
            oldest = next(iter(self._partial))
            self.cut(oldest, "its packet was the slowest while memory ran short", now)
