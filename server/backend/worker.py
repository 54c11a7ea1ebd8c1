"""The MQTT worker: takes queries from every device's topic, and replies to each device.

Queries are decoded in the link's network thread, which never waits. They are computed in the
batcher's thread, unless a run is shorter than the way there. A reply has the QoS of its query, so
that a device decides by what it sends. A query that comes twice is computed once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge_sdk.errors import FrameError, FrameTooLargeError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.session import Array
from edge_sdk.wire.frames import MQTT_LIMITS, Limits, unpack, unpack_header
from edge_sdk.wire.messages import Problem, Query, Reply, frame_id, pack_reply, read_query
from edge_sdk.wire.topics import Kind, Topic, all_devices, parse_topic
from server.backend.duplicates import RecentQueries, Served
from server.backend.inference import Inference, problem_of
from server.errors import ExpiredError, OverloadedError, ServerError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sender:
    """The device that sent a query, and the topic and the QoS of its reply."""

    device: str
    topic: str
    qos: int


class MqttWorker:
    """Serves the queries that arrive on `link`.

    Args:
        seen: called in the network thread with the device id of each query.
        shared: name of a shared subscription, which divides the queries among several workers
            (on Mosquitto and EMQX; the embedded broker has none).
    """

    def __init__(
        self,
        link: MqttLink,
        inference: Inference,
        *,
        seen: Callable[[str], None] | None = None,
        shared: str | None = None,
        limits: Limits = MQTT_LIMITS,
    ) -> None:
        self._link = link
        self._inference = inference
        self._seen = seen
        self._limits = limits
        self.malformed = 0
        self.recent = RecentQueries()
        prefix = "" if shared is None else f"$share/{shared}/"
        self._filter = prefix + all_devices(Kind.QUERY)
        link.subscribe(self._filter, self._receive)

    def leave(self, timeout_s: float) -> None:
        """Take no more queries: the other workers of a shared subscription get them.

        Returns once the broker has said so, or after `timeout_s`.
        """
        self._link.unsubscribe(self._filter, timeout_s)

    def _receive(self, message: Message) -> None:
        try:
            asked = parse_topic(message.topic)
        except FrameError as err:
            logger.warning("query dropped: %s", err)
            return
        if message.retained:
            return  # the broker kept it, maybe for days: no device waits for its answer
        topic = str(Topic(asked.fleet, asked.device, Kind.REPLY))
        sender = Sender(asked.device, topic, message.qos)
        if self._seen is not None:
            self._seen(asked.device)
        identifier, problem = "", Problem.MALFORMED
        try:
            try:
                self._inference.senders.arrived(asked.device, len(message.payload))
            except OverloadedError as err:  # refused by its header alone
                header, has_tensors = unpack_header(message.payload, self._limits)
                identifier = frame_id(header)
                if has_tensors:
                    self._refuse_early(identifier, sender, err)
                    return
            frame = unpack(message.payload, self._limits)
            identifier, problem = frame_id(frame), Problem.BAD_REQUEST
            query = read_query(frame)
        except FrameError as err:
            self.malformed += 1
            self._send(sender, pack_problem(identifier, problem, str(err)))
            return
        if query.tensor is None:  # a probe
            self._answer_probe(query.id, sender)
            return
        now = time.monotonic()
        served, new = self.recent.come(sender.device, query.id, query.deadline_ms, now)
        if new:
            self._serve(query, served, sender)
        elif served.reply is not None:
            self._send(sender, served.reply)

    def _answer_probe(self, identifier: str, sender: Sender) -> None:
        if self._inference.ready:
            self._send(sender, pack_reply(Reply(identifier), "", ""))
        else:
            self._send(sender, pack_problem(identifier, Problem.NOT_READY, "not ready"))

    def _serve(self, query: Query, served: Served, sender: Sender) -> None:
        name = version = ""
        trace = self._inference.trace(query, sender.device)

        def done(outcome: Array | ServerError) -> None:
            reply_s = None if trace is None else time.monotonic()
            if isinstance(outcome, ServerError):
                self.recent.drop(served)
            if isinstance(outcome, ExpiredError):
                reply_s = None  # the device has given its local answer by now
            elif isinstance(outcome, ServerError):
                self._refuse(query.id, sender, outcome)
            else:
                reply = pack_reply(Reply(query.id, {output: outcome}), name, version)
                self.recent.replied(served, reply)  # first: a second message may come at once
                self._send(sender, reply)
            if trace is not None:
                trace.end(outcome, reply_s)

        try:
            model = self._inference.models.served(query.model, query.version)
            name, version, output = model.manifest.name, model.manifest.version, model.engine.output
            # that very one: another version may become active meanwhile, and the reply names it
            self._inference.submit(
                query, done, sender=sender.device, may_run_here=True, trace=trace, model=model
            )
        except ServerError as err:
            reply_s = time.monotonic()
            self.recent.drop(served)
            self._refuse(query.id, sender, err)
            if trace is not None:
                trace.end(err, reply_s)

    def _refuse_early(self, identifier: str, sender: Sender, error: OverloadedError) -> None:
        """Refuse a query by its header, unless it repeats one: that one is answered or under way.

        A refusal would otherwise overtake the answer.
        """
        served = self.recent.find(sender.device, identifier)
        if served is None:
            self._refuse(identifier, sender, error)
        elif served.reply is not None:
            self._send(sender, served.reply)

    def _refuse(self, identifier: str, sender: Sender, error: ServerError) -> None:
        retry = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
        self._send(sender, pack_problem(identifier, problem_of(error), str(error), retry))

    def _send(self, sender: Sender, payload: bytes) -> None:
        try:
            sent = self._link.publish(sender.topic, payload, qos=sender.qos)
        except FrameTooLargeError as err:
            logger.warning("reply dropped: %s", err)
            return
        if not sent:
            logger.debug("reply to %s dropped: link down", sender.topic)


def pack_problem(
    identifier: str, problem: Problem, detail: str, retry_after_s: float = 0.0
) -> bytes:
    """The message of a reply that is no answer."""
    reply = Reply(identifier, problem=problem, detail=detail, retry_after_s=retry_after_s)
    return pack_reply(reply, "", "")
