"""Asking the server: queries out, replies in, and knowing when not to ask.

The server is `unknown` until the first answer, `present` after one, `away` after a deadline passed
without one or the link broke. While it is away nothing waits for it: `begin` says so at once, and a
background thread sends a probe every `probe_interval_s` until one is answered. A server that
answers probes but no query in time is believed less and less often.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import orjson

from edge_sdk.errors import FrameError, SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.mqtt import BrokerAddress, Message, MqttLink, Rpc, Will
from edge_sdk.wire.frames import Tensor, unpack
from edge_sdk.wire.messages import (
    Problem,
    Query,
    Reply,
    new_id,
    pack_query,
    read_reply,
)
from edge_sdk.wire.topics import Kind, Topic

logger = logging.getLogger(__name__)

HTTP_WORKERS: Final = 2
# Down this long, the broker may have moved: the server is asked where it is now.
RELOCATE_AFTER_S: Final = 3.0
PROBES_REMEMBERED: Final = 16
# A probe must not outlive the next two.
PROBE_DEADLINE_MS: Final = 2_000.0
# A server that came back and missed the next deadline too is left alone for as long as this.
DOUBT_MAX_S: Final = 4.0
TIMED_OUT: Final = "no reply within the deadline"
CLOSED: Final = "the agent is closed"


class Presence(Enum):
    """What is known of the server."""

    UNKNOWN = "unknown"
    PRESENT = "present"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class NoReply:
    """There will be no answer in time, and why."""

    reason: str


Outcome = Reply | NoReply


class Pending:
    """One query under way. Whoever completes it first wins."""

    __slots__ = ("_claim", "_done", "deadline", "id", "outcome")

    def __init__(self, identifier: str, deadline: float) -> None:
        self.id = identifier
        self.deadline = deadline
        self.outcome: Outcome | None = None
        # a lock held until completion: half the cost of an Event on the hot path
        self._done = threading.Lock()
        self._done.acquire()
        self._claim = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.outcome is not None

    def complete(self, outcome: Outcome) -> None:
        """Hand over the outcome; a second call changes nothing."""
        if self._claim.acquire(blocking=False):
            self.outcome = outcome
            self._done.release()

    def wait(self) -> Outcome | None:
        """The outcome, or None when the deadline passes first."""
        if self.outcome is None:
            left_s = self.deadline - time.monotonic()
            if left_s > 0:
                self._done.acquire(timeout=left_s)
        return self.outcome


@dataclass(frozen=True, slots=True)
class Target:
    """Which model answers this device's queries."""

    model: str
    version: str


class Offloader:
    """The device's side of every offload.

    Args:
        locate: asks the server for the broker's address; called when the link stays down.
        on_command: receives the server's commands (a JSON object each) in the network thread.
        telemetry: what a heartbeat says.
    """

    def __init__(
        self,
        identity: Identity,
        broker: BrokerAddress,
        *,
        max_packet_bytes: int = 2_000_000,
        probe_interval_s: float = 0.5,
        heartbeat_s: float = 30.0,
        locate: Callable[[], BrokerAddress | None] | None = None,
        on_command: Callable[[Mapping[str, Any]], None] | None = None,
        telemetry: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._identity = identity
        self._probe_interval_s = probe_interval_s
        self._heartbeat_s = heartbeat_s
        self._locate = locate
        self._on_command = on_command
        self._telemetry = telemetry
        self._max_packet_bytes = max_packet_bytes
        self._pending: dict[str, Pending] = {}
        self._presence = Presence.UNKNOWN
        self._why_away = ""
        self._not_before = 0.0
        self._misses = 0
        self._doubt_until = 0.0
        # several: where a round trip takes longer than the interval, the last is never answered
        self._probes: deque[str] = deque(maxlen=PROBES_REMEMBERED)
        self._closing = False
        self._up_at = self._next_beat = time.monotonic()
        self._wake = threading.Condition()
        self._http: ThreadPoolExecutor | None = None
        self.late_replies = 0
        self.refused_replies = 0
        self.bytes_up = 0
        topics = {kind: str(Topic(identity.fleet, identity.device, kind)) for kind in Kind}
        self._topics = topics
        self._open_link(broker)
        self._watcher = threading.Thread(target=self._watch, name="splitedge-watch", daemon=True)
        self._watcher.start()

    @property
    def presence(self) -> Presence:
        """What is known of the server."""
        return self._presence

    @property
    def why_away(self) -> str:
        """Why nothing is asked at present; empty when something would be."""
        return self._why_away if self._presence is Presence.AWAY else ""

    def begin(
        self,
        tensor: Callable[[], Tensor],
        target: Target,
        deadline_s: float,
        identifier: str | None = None,
    ) -> Pending:
        """Send a query, unless the server is known to be away or asked to be spared.

        Args:
            tensor: makes what is sent; not called when nothing is.
            identifier: of a query that was sent before; a new one when None.
        """
        now = time.monotonic()
        pending = Pending(identifier or new_id(), now + deadline_s)
        reason = self._refusal(now, pending.deadline)
        if reason is not None:
            pending.complete(NoReply(reason))
            return pending
        left_ms = max((pending.deadline - time.monotonic()) * 1e3, 1.0)
        query = Query(pending.id, target.model, target.version, tensor(), left_ms)
        self._pending[pending.id] = pending
        self._send(query, pending)
        return pending

    def finish(self, pending: Pending) -> Outcome:
        """Wait for the outcome of a begun query, at most until its deadline."""
        outcome = pending.wait()
        self.forget(pending)
        if outcome is None:
            outcome = NoReply(TIMED_OUT)
            pending.complete(outcome)
            self._miss()
        return outcome

    def forget(self, pending: Pending) -> None:
        """Take no reply for a begun query any more."""
        self._pending.pop(pending.id, None)

    def close(self) -> None:
        """Say goodbye and end the background threads."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._fail_pending(CLOSED)
        self._watcher.join()
        self._link.stop(last_words=Will(self._topics[Kind.STATUS], _status("offline")))
        if self._http is not None:
            self._http.shutdown(cancel_futures=True)

    def _refusal(self, now: float, deadline: float) -> str | None:
        if self._closing:
            return CLOSED
        if self._presence is Presence.UNKNOWN and not self._link.connected:
            # just started: the first query waits for the link, later ones know better
            try:
                self._link.wait_connected(max(deadline - now, 0.0))
            except SplitedgeError as err:
                self._set_away(str(err))
        if self._presence is Presence.AWAY:
            return f"server away: {self._why_away}"
        if now < self._not_before:
            return "the server asked to be spared"
        return None

    def _send(self, query: Query, pending: Pending) -> None:
        payload = pack_query(query)
        size_bytes = len(payload)
        self.bytes_up += size_bytes
        if size_bytes > self._max_packet_bytes:
            self._send_http(query, pending)
            return
        rpc = Rpc(
            response_topic=self._topics[Kind.REPLY],
            correlation=bytes.fromhex(query.id),
            expiry_s=max(1, round((query.deadline_ms or 1e3) / 1e3)),
        )
        if not self._link.publish(self._topics[Kind.QUERY], payload, rpc=rpc):
            down = not self._link.connected
            reason = f"not sent: {self._link.last_error if down else 'too much waits to be sent'}"
            pending.complete(NoReply(reason))
            self._set_away(reason)

    def _send_http(self, query: Query, pending: Pending) -> None:
        from edge_sdk.api import infer  # noqa: PLC0415 - urllib3 is 2 MB that most agents never need

        def send() -> None:
            if pending.done:
                return
            try:
                self._complete(pending, infer(self._identity, query, pending.deadline))
            except SplitedgeError as err:
                pending.complete(NoReply(str(err)))
            except Exception as err:  # the executor keeps it, and the caller waits out its deadline
                logger.exception("an offload over HTTP failed")
                pending.complete(NoReply(f"not sent: {err}"))

        with self._wake:
            if self._closing:
                pending.complete(NoReply(CLOSED))
                return
            if self._http is None:
                self._http = ThreadPoolExecutor(HTTP_WORKERS, "splitedge-http")
            self._http.submit(send)

    def _receive(self, message: Message) -> None:
        try:
            reply = read_reply(unpack(message.payload))
        except FrameError as err:
            # counted all, told once: a peer that sends nonsense sends a lot of it
            level = logging.DEBUG if self.refused_replies else logging.WARNING
            self.refused_replies += 1
            logger.log(level, "reply refused: %s", err)
            return
        if reply.id in self._probes:
            if reply.problem is None and time.monotonic() >= self._doubt_until:
                self._set_present()
            return
        # taken out at once: a second reply to the same query is late, whoever waits for the first
        pending = self._pending.pop(reply.id, None)
        if pending is None:
            self.late_replies += 1
            return
        self._complete(pending, reply)
        self._misses = 0
        if self._presence is not Presence.PRESENT:
            self._set_present()

    def _complete(self, pending: Pending, reply: Reply) -> None:
        if reply.problem is Problem.OVERLOADED:
            self._not_before = time.monotonic() + reply.retry_after_s
        pending.complete(reply)

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
            self._set_away(self._link.last_error)
            self._fail_pending(self._link.last_error)

    def _fail_pending(self, reason: str) -> None:
        for pending in list(self._pending.values()):
            pending.complete(NoReply(reason))

    def _set_present(self) -> None:
        if self._presence is Presence.AWAY:
            logger.info("device=%s the server is back", self._identity.device)
        self._presence = Presence.PRESENT

    def _miss(self) -> None:
        """A query got no reply in time."""
        if self._presence is not Presence.AWAY:
            # the first miss costs nothing more than the probe that follows it
            self._misses += 1
            doubt_s = self._probe_interval_s * 2 ** min(self._misses - 1, 10)
            if self._misses > 1:
                self._doubt_until = time.monotonic() + min(doubt_s, DOUBT_MAX_S)
        self._set_away(TIMED_OUT)

    def _set_away(self, why: str) -> None:
        if self._presence is not Presence.AWAY:
            logger.info("device=%s the server is away: %s", self._identity.device, why)
        self._why_away = why
        self._presence = Presence.AWAY
        with self._wake:
            self._wake.notify_all()

    def _watch(self) -> None:
        """Probe while the server is away, beat, and look for a broker that moved."""
        while not self._closing:
            try:
                self._look()
            except Exception:  # outermost loop of this thread: without it nobody would ever probe
                logger.exception("watching the server failed")
            with self._wake:
                if not self._closing:
                    self._wake.wait(self._pause_s(self._next_beat - time.monotonic()))

    def _look(self) -> None:
        now = time.monotonic()
        if not self._link.connected:
            if now - self._up_at > RELOCATE_AFTER_S:
                self._relocate()
                self._up_at = now
            return
        self._up_at = now
        if self._presence is not Presence.PRESENT:
            self._send_probe()
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat_s
            self._beat()

    def _pause_s(self, to_next_beat_s: float) -> float:
        if self._presence is Presence.PRESENT:
            return max(to_next_beat_s, 0.01)
        jitter = random.uniform(0.75, 1.25)  # noqa: S311 - jitter, not a secret
        return self._probe_interval_s * jitter

    def _send_probe(self) -> None:
        probe = Query(new_id(), None, None, None, PROBE_DEADLINE_MS)
        self._probes.append(probe.id)
        self._link.publish(self._topics[Kind.QUERY], pack_query(probe))

    def _beat(self) -> None:
        said = {} if self._telemetry is None else self._telemetry()
        self._link.publish(self._topics[Kind.TELEMETRY], orjson.dumps(said), qos=0)

    def _relocate(self) -> None:
        broker = None if self._locate is None else self._locate()
        if broker is None or broker == self._link.address:
            return
        logger.info("device=%s the broker moved to %s", self._identity.device, broker.url)
        self._link.stop()
        self._open_link(broker)


def _status(word: str) -> bytes:
    return orjson.dumps({"status": word})
