"""The MQTT worker: takes queries from every device's topic, and replies to each device.

Queries are decoded in the link's network thread, which never waits. They are computed in the
batcher's thread, unless a run is shorter than the way there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from edge_sdk.errors import FrameError, FrameTooLargeError
from edge_sdk.mqtt import Message, MqttLink
from edge_sdk.session import Array
from edge_sdk.wire.frames import MQTT_LIMITS, Limits, unpack, unpack_header
from edge_sdk.wire.messages import Problem, Query, Reply, frame_id, pack_reply, read_query
from edge_sdk.wire.topics import Kind, Topic, all_devices, parse_topic
from server.backend.inference import Inference, problem_of
from server.errors import ExpiredError, OverloadedError, ServerError

logger = logging.getLogger(__name__)


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
                    self._refuse(identifier, topic, err)
                    return
            frame = unpack(message.payload, self._limits)
            identifier, problem = frame_id(frame), Problem.BAD_REQUEST
            query = read_query(frame)
        except FrameError as err:
            self.malformed += 1
            self._send(topic, Reply(identifier, problem=problem, detail=str(err)))
            return
        self._serve(query, topic, asked.device)

    def _serve(self, query: Query, topic: str, sender: str) -> None:
        if query.tensor is None:  # a probe
            ready = self._inference.ready
            problem = None if ready else Problem.NOT_READY
            self._send(topic, Reply(query.id, problem=problem, detail="" if ready else "not ready"))
            return
        name = version = ""
        trace = self._inference.trace(query, sender)

        def done(outcome: Array | ServerError) -> None:
            reply_s = None if trace is None else time.monotonic()
            if isinstance(outcome, ExpiredError):
                reply_s = None  # the device has given its local answer by now
            elif isinstance(outcome, ServerError):
                self._refuse(query.id, topic, outcome)
            else:
                self._send(topic, Reply(query.id, {output: outcome}), name, version)
            if trace is not None:
                trace.end(outcome, reply_s)

        try:
            model = self._inference.models.served(query.model, query.version)
            name, version, output = model.manifest.name, model.manifest.version, model.engine.output
            # that very one: another version may become active meanwhile, and the reply names it
            self._inference.submit(
                query, done, sender=sender, may_run_here=True, trace=trace, model=model
            )
        except ServerError as err:
            reply_s = time.monotonic()
            self._refuse(query.id, topic, err)
            if trace is not None:
                trace.end(err, reply_s)

    def _refuse(self, identifier: str, topic: str, error: ServerError) -> None:
        retry = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
        reply = Reply(identifier, problem=problem_of(error), detail=str(error), retry_after_s=retry)
        self._send(topic, reply)

    def _send(self, topic: str, reply: Reply, model: str = "", version: str = "") -> None:
        try:
            sent = self._link.publish(topic, pack_reply(reply, model, version))
        except FrameTooLargeError as err:
            logger.warning("reply dropped: %s", err)
            return
        if not sent:
            logger.debug("reply to %s dropped: link down", topic)
