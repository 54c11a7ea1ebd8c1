"""Offloads: sends queries, receives replies, and probes a server that is away.

`availability` decides whether a query may be sent. While the server is away `begin` refuses at
once, and a background thread sends a probe every `probe_interval_s` until one is answered.

A live query goes at QoS 0, which takes two packets in place of four. If half of its time is gone
without a reply, it is sent once more with the same id: the server computes it once, and the first
reply counts. While more than AT_ONCE queries wait for replies, further ones go at QoS 1: brokers
hold back a sender of those whose receiver is slow, and their acknowledgements tell that the link is
behind. A query out of the outbox goes at QoS 1 too.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import orjson

from edge_sdk.errors import FrameError, SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message, Rpc, Will
from edge_sdk.offload.availability import TIMED_OUT, Availability, Presence
from edge_sdk.offload.http_queries import HttpQueries
from edge_sdk.offload.link_meter import LinkMeter
from edge_sdk.offload.packs import Packs, Row
from edge_sdk.offload.pending import (
    CLOSED,
    Again,
    NoReply,
    OpenQueries,
    Outcome,
    Pending,
    Target,
)
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.frames import Tensor, unpack
from edge_sdk.wire.messages import (
    Problem,
    Query,
    Reply,
    new_id,
    pack_query,
    read_reply,
)
from edge_sdk.wire.topics import PAYLOAD_BYTES, Kind, Topic
from edge_sdk.wire.traceparent import TraceContext

logger = logging.getLogger(__name__)

# After this long without a link the broker may have moved: ask the server for its address.
RELOCATE_AFTER_S: Final = 3.0
PROBES_REMEMBERED: Final = 16
# A broker may drop a probe after this long.
PROBE_DEADLINE_MS: Final = 2_000.0
# A query is sent if what was sent before it waits for the broker for at most this share of its
# time: the server's queue and the way back need the rest.
LINK_SHARE: Final = 0.25
BEHIND: Final = "not sent: the link is behind, and the reply would come too late"
# live queries under way at QoS 0
AT_ONCE: Final = 4
# a lost query is noticed when this share of its time is gone
AGAIN_SHARE: Final = 0.5
# What brokers say to a login that they do not know, and to a client that they cut.
NOT_AUTHORISED: Final = ("Not authorized", "Administrative action")
NOT_LET_IN: Final = (
    "it is revoked, waits for approval, or its credential was replaced:"
    " see `splitedge agent status`"
)


class Offloader:
    """The device's side of every offload.

    Args:
        locate: asks the server for the broker's address; called while the link stays down.
        on_command: receives the server's commands (one JSON object each) in the network thread.
        telemetry: makes the content of a heartbeat.
        deadline_s: the agent's own. A query that gets no reply within it, or longer, shows that the
            server is away; after a query with less time, a probe does.
    Attributes:
        meter: times the link by the queries and probes that cross it.
        sent_again: queries that were sent a second time.
    """

    def __init__(
        self,
        identity: Identity,
        broker: BrokerAddress,
        *,
        max_packet_bytes: int = PAYLOAD_BYTES,
        deadline_s: float = 1.0,
        probe_interval_s: float = 0.5,
        heartbeat_s: float = 30.0,
        locate: Callable[[], BrokerAddress | None] | None = None,
        on_command: Callable[[Mapping[str, Any]], None] | None = None,
        telemetry: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._identity = identity
        self._availability = Availability(probe_interval_s, deadline_s)
        self._probe_interval_s = probe_interval_s
        self._heartbeat_s = heartbeat_s
        self._locate = locate
        self._on_command = on_command
        self._telemetry = telemetry
        self._max_packet_bytes = max_packet_bytes
        self._open = OpenQueries()
        # several: if a round trip takes longer than the interval, the last one is never answered
        self._probes: deque[str] = deque(maxlen=PROBES_REMEMBERED)
        self._closing = False
        self._up_at = self._next_heartbeat = time.monotonic()
        self._wake = threading.Condition()
        self._relinking = threading.Lock()
        self._http = HttpQueries(identity, self._complete, self._count)
        self._packs = Packs(self._ask, self._open.forget, self._send_again, max_packet_bytes)
        self.meter = LinkMeter()
        self.refused_replies = 0
        self.sent_again = 0
        self.bytes_up = 0
        self.bytes_down = 0
        topics = {kind: str(Topic(identity.fleet, identity.device, kind)) for kind in Kind}
        self._topics = topics
        self._open_link(broker)
        self._watcher = threading.Thread(target=self._watch, name="splitedge-watch", daemon=True)
        self._watcher.start()

    @property
    def late_replies(self) -> int:
        """Replies to queries that did not wait for them any more."""
        return self._open.late

    @property
    def presence(self) -> Presence:
        """Presence of the server, as far as the device knows."""
        return self._availability.presence

    @property
    def why_away(self) -> str:
        """Why the server is away; empty if it is not."""
        return self._availability.why_away

    def begin(
        self,
        tensor: Callable[[], Tensor],
        target: Target,
        deadline_s: float,
        identifier: str | None = None,
        trace: TraceContext | None = None,
        *,
        together: bool = False,
        short: bool = False,
    ) -> Pending:
        """Send a query, unless the server is away or overloaded, or the link is behind.

        Args:
            tensor: makes the tensor to send; not called if nothing is sent.
            identifier: id of a query that was sent before, and that is kept until it has an
                answer; None makes a live query with a new id.
            trace: the span that the server continues; None for a query that is not traced.
            together: may cross the wire in one message with others that begin at this time.
            short: the caller gave it less time than the agent's own deadline.
        """
        now = time.monotonic()
        pending = Pending(identifier or new_id(), now + deadline_s, short=short)
        reason = self._refusal(now, pending.deadline)
        behind_s = self._link.behind_s(time.monotonic()) if reason is None else 0.0
        if behind_s > LINK_SHARE * deadline_s:
            reason = BEHIND
        if reason is not None:
            pending.complete(NoReply(reason))
            return pending
        ready = tensor()
        if together and trace is None and self._packs.takes(ready):
            self._packs.add(Row(pending, target, ready))
        else:
            self._ask(pending, target, ready, trace, live=identifier is None)
        return pending

    def send_gathered(self) -> None:
        """Send the queries that were begun with `together` and wait for more of them."""
        self._packs.flush()

    def finish(self, pending: Pending) -> Outcome:
        """Wait for the outcome of a begun query, at most until its deadline."""
        again = pending.again
        if again is not None and pending.wait(again.at) is None:
            self._send_again(pending)
        in_time = pending.wait() is not None
        self.forget(pending)
        outcome = pending.give_up(TIMED_OUT)
        if not in_time and isinstance(outcome, NoReply):
            self._missed(pending)
        return outcome

    def forget(self, pending: Pending) -> None:
        """Ignore any reply to a begun query from now on."""
        self._packs.forget(pending)
        self._open.forget(pending)

    def send_heartbeat_soon(self) -> None:
        """Send the next heartbeat now, not when its time comes: there is news."""
        with self._wake:
            self._next_heartbeat = time.monotonic()
            self._wake.notify_all()

    def change_identity(self, identity: Identity) -> None:
        """Connect again with another credential; queries that are under way get no reply."""
        self._http.change_identity(identity)
        with self._relinking:
            self._identity = identity
            if not self._closing:
                self._link.stop()
                self._open_link(self._link.address)

    def close(self) -> None:
        """Publish that the device is offline, disconnect and end the background threads."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._packs.close()
        self._open.fail_all(CLOSED)
        self._watcher.join()
        with self._relinking:
            link = self._link
        if link.connected:
            self._send_last_heartbeat()
        link.stop(last_words=Will(self._topics[Kind.STATUS], _status("offline")))
        self._http.close()
        self._open.fail_all(CLOSED)  # the queries that began meanwhile

    def _missed(self, pending: Pending) -> None:
        """Report a query without a reply in time; after one with little time, ask by a probe."""
        now, availability = time.monotonic(), self._availability
        if not pending.short:
            self._note(partial(availability.deadline_missed, now))
            return
        doubted = availability.doubted
        self._note(partial(availability.short_deadline_missed, now))
        if not doubted:
            self._send_probe()

    def _refusal(self, now: float, deadline: float) -> str | None:
        if self._closing:
            return CLOSED
        if self.presence is Presence.UNKNOWN and not self._link.connected:
            # just started: only the first query waits for the link
            try:
                self._link.wait_connected(max(deadline - now, 0.0))
            except SplitedgeError as err:
                self._note(partial(self._availability.link_lost, _explained(str(err))))
        return self._availability.refusal(now)

    def _ask(
        self,
        pending: Pending,
        target: Target,
        tensor: Tensor,
        trace: TraceContext | None = None,
        *,
        live: bool = True,
    ) -> None:
        now = time.monotonic()
        # of when the server gets it, as far as is known here
        left_ms = max((pending.deadline - self._link.behind_s(now) - now) * 1e3, 1.0)
        query = Query(pending.id, target.model, target.version, tensor, left_ms, trace)
        payload = pack_query(query)
        self._open.add(pending)
        if len(payload) > self._max_packet_bytes:
            self._http.send(query, pending)
            return
        if live:
            pending.again = Again(query, now + AGAIN_SHARE * (pending.deadline - now))
        qos = 0 if live and len(self._open) <= AT_ONCE else 1
        if not self._send(query, payload, pending, qos):
            down = not self._link.connected
            reason = f"not sent: {self._link.last_error if down else 'the send queue is full'}"
            pending.complete(NoReply(reason))
            self._note(partial(self._availability.link_lost, reason))

    def _send_again(self, pending: Pending) -> None:
        """Send a live query once more, unless its outcome is there or its time is over."""
        query = pending.take_again(time.monotonic())
        if query is not None and self._send(query, pack_query(query), pending, qos=0):
            self.sent_again += 1
            # of its two messages, the reply does not say which it answers
            self.meter.forget(query.id)

    def _send(self, query: Query, payload: bytes, pending: Pending, qos: int) -> bool:
        rpc = Rpc(
            response_topic=self._topics[Kind.REPLY],
            correlation=bytes.fromhex(query.id),
            expiry_s=max(1, round((query.deadline_ms or 1e3) / 1e3)),
        )
        pending.count_sent(len(payload))
        self.meter.sent(query.id, len(payload))
        sent = self._link.publish(self._topics[Kind.QUERY], payload, qos=qos, rpc=rpc)
        if sent:
            self.bytes_up += len(payload)
        else:
            pending.count_unsent(len(payload))
        return sent

    def _receive(self, message: Message) -> None:
        try:
            reply = read_reply(unpack(message.payload))
        except FrameError as err:
            # all are counted, one is logged: a faulty peer sends many
            level = logging.DEBUG if self.refused_replies else logging.WARNING
            self.refused_replies += 1
            logger.log(level, "reply refused: %s", err)
            return
        self.meter.answered(reply.id, len(message.payload))
        if reply.id in self._probes:
            if reply.problem is None:
                self._note(partial(self._availability.probe_answered, time.monotonic()))
            return
        self.bytes_down += len(message.payload)
        pending = self._open.take(reply.id)
        if pending is None:
            return
        pending.count_received(len(message.payload))
        self._complete(pending, reply)

    def _count(self, pending: Pending, up: int, down: int) -> None:
        """Count bytes that go over HTTP."""
        pending.bytes_up += up
        pending.bytes_down += down
        self.bytes_up += up
        self.bytes_down += down

    def _complete(self, pending: Pending, reply: Reply) -> None:
        if reply.problem is Problem.OVERLOADED:
            now = time.monotonic()
            self._note(partial(self._availability.overloaded, now, reply.retry_after_s))
        if pending.complete(reply):
            self._note(self._availability.query_answered)

    def _receive_command(self, message: Message) -> None:
        try:
            command = orjson.loads(message.payload)
        except orjson.JSONDecodeError as err:
            logger.warning("command refused: not JSON (%s)", err)
            return
        if isinstance(command, dict) and self._on_command is not None:
            self._on_command(command)

    def _open_link(self, broker: BrokerAddress) -> None:
        self._link = MqttLink(
            broker,
            client_id=self._identity.device,
            password=self._identity.credential,
            will=Will(self._topics[Kind.STATUS], _status("offline")),
            ca=None if self._identity.ca is None else str(self._identity.ca),
            max_packet_bytes=self._max_packet_bytes,
            on_state=self._link_changed,
            insecure=self._identity.insecure,
        )
        self._link.subscribe(self._topics[Kind.REPLY], self._receive)
        self._link.subscribe(self._topics[Kind.COMMAND], self._receive_command)
        self._link.start()

    def _link_changed(self, up: bool) -> None:
        if up:
            self._link.publish(self._topics[Kind.STATUS], _status("online"), retain=True)
            with self._wake:
                self._wake.notify_all()
        else:
            why = _explained(self._link.last_error)
            self._note(partial(self._availability.link_lost, why))
            self._open.fail_all(why)

    def _note(self, event: Callable[[], None]) -> None:
        """Report an event to the availability, and log a change.

        The watcher wakes and probes at once when the server goes away. Further events of a server
        that is away leave the watcher's pause as it is: an answer to a probe must not bring the
        next probe.
        """
        with self._wake:
            before = self.presence
            event()
            after = self.presence
            why = self.why_away
            if after is Presence.AWAY and before is not Presence.AWAY:
                self._wake.notify_all()
        if after is before or self._closing:  # at the end the device leaves, not the server
            return
        if after is Presence.AWAY:
            logger.info("device=%s the server is away: %s", self._identity.device, why)
        elif before is Presence.AWAY:
            logger.info("device=%s the server is back", self._identity.device)

    def _watch(self) -> None:
        """Probe while the server is away, send heartbeats, and find a broker that moved."""
        while not self._closing:
            try:
                self._look()
            except Exception:  # outermost loop of this thread: without it nothing would probe
                logger.exception("watching the server failed")
            with self._wake:
                if not self._closing:
                    self._wake.wait(self._pause_s(self._next_heartbeat - time.monotonic()))

    def _look(self) -> None:
        now = time.monotonic()
        if not self._link.connected:
            self._say_refused()
            if now - self._up_at > RELOCATE_AFTER_S:
                self._relocate()
                self._up_at = now
            return
        self._up_at = now
        if self.presence is not Presence.PRESENT:
            self._send_probe()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            self._send_heartbeat()
            if self.presence is Presence.PRESENT:
                self._send_probe()  # it times the link

    def _say_refused(self) -> None:
        """Say once that the broker lets this device in no more; a cut alone may not tell it."""
        why = _explained(self._link.last_error)
        if self.presence is Presence.AWAY and NOT_LET_IN in why and why != self.why_away:
            self._note(partial(self._availability.link_lost, why))
            logger.warning("device=%s %s", self._identity.device, why)

    def _pause_s(self, to_heartbeat_s: float) -> float:
        if self.presence is Presence.PRESENT:
            return max(to_heartbeat_s, 0.01)
        jitter = random.uniform(0.75, 1.25)  # noqa: S311 - jitter, not a secret
        return self._probe_interval_s * jitter

    def _send_probe(self) -> None:
        probe = Query(new_id(), None, None, None, PROBE_DEADLINE_MS)
        self._probes.append(probe.id)
        payload = pack_query(probe)
        self.meter.sent(probe.id, len(payload), probe=True)
        self._link.publish(self._topics[Kind.QUERY], payload, qos=0)

    def _send_heartbeat(self) -> None:
        telemetry = {} if self._telemetry is None else self._telemetry()
        self._link.publish(self._topics[Kind.TELEMETRY], orjson.dumps(telemetry), qos=0)

    def _send_last_heartbeat(self) -> None:
        """Tell what was counted since the heartbeat before."""
        try:
            self._send_heartbeat()
        except Exception:  # a device's own observers may fail; the link is closed all the same
            logger.exception("the last heartbeat was not sent")

    def _relocate(self) -> None:
        broker = None if self._locate is None else self._locate()
        if broker is None or broker == self._link.address:
            return
        logger.info("device=%s the broker moved to %s", self._identity.device, broker.url)
        with self._relinking:
            self._link.stop()
            self._open_link(broker)


def _explained(why: str) -> str:
    """Why a link is down; where the broker says no, with what that may mean for a device."""
    if any(words in why for words in NOT_AUTHORISED):
        return f"{why} ({NOT_LET_IN})"
    return why


def _status(word: str) -> bytes:
    return orjson.dumps({"status": word})
