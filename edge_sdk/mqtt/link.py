"""A link to an MQTT broker that reconnects by itself.

Handlers run in paho's network thread, so they must pass work on and never wait.

    link = MqttLink(BrokerAddress.parse("mqtt://127.0.0.1:1883"), client_id="pi-4", password="...")
    link.subscribe("splitedge/v1/default/pi-4/reply", on_reply)
    link.start()
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edge_sdk.errors import FrameTooLargeError, LinkError
from edge_sdk.installation import clock_is_wrong
from edge_sdk.mqtt.backlog import Backlog
from edge_sdk.mqtt.client import Client
from edge_sdk.mqtt.messages import Message, Rpc, RpcProperties, Will
from edge_sdk.mqtt.reasons import why_lost, why_unreachable
from edge_sdk.tls import pinned_tls_context, set_date_checks, tls_context
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.clear_text import clear_text_reason, is_clear
from edge_sdk.wire.topics import PAYLOAD_BYTES

logger = logging.getLogger(__name__)

# The fleet reconnects to a restarted broker within 10 s, but not at one instant: each delay is
# drawn from [bound / 2, bound], and the bound doubles up to RECONNECT_LAST_S.
RECONNECT_FIRST_S: Final = 0.25
RECONNECT_LAST_S: Final = 2.0
CUT_AFTER_S: Final = 1.0
# messages that may wait here, over those that may wait for the broker's acknowledgement
QUEUED_TIMES: Final = 4
UNSUPPORTED_PROTOCOL: Final = "Unsupported protocol version"


Handler = Callable[[Message], None]


class MqttLink:
    """A connection that reconnects with jitter, resubscribes and bounds its queue.

    Tries MQTT 5 once, and stays with 3.1.1 if the broker refuses it. It never connects with a
    password to another machine without encryption, unless `insecure`; `last_error` says so.

    Args:
        username: None takes the client id; an empty one sends no login.
        ca: PEM file of the authority that verifies a TLS broker; None takes the system's store.
        pinned: PEM file of the certificate that the broker must present; its names are not checked.
        max_packet_bytes: larger payloads are refused before they are sent: a broker would cut
            the connection, and paho would send them again without end.
        mqtt5: False starts with 3.1.1, for a peer without use for the properties of 5, which take
            35 us a message to read.
        insecure: send the password unencrypted to other machines too.
        on_state: called in the network thread, with True when the connection is up and subscribed,
            with False when it is lost.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        client_id: str,
        username: str | None = None,
        password: str | None = None,
        will: Will | None = None,
        ca: str | None = None,
        pinned: str | None = None,
        keepalive_s: int = 30,
        max_packet_bytes: int = PAYLOAD_BYTES,
        max_in_flight: int = 256,
        on_state: Callable[[bool], None] | None = None,
        mqtt5: bool = True,
        insecure: bool = False,
    ) -> None:
        self.address = address
        self._client_id = client_id
        self._username = client_id if username is None else username
        self._password = password
        self._will = will
        self._ca = ca
        self._pinned = pinned
        self._keepalive_s = keepalive_s
        self._max_packet_bytes = max_packet_bytes
        self._max_in_flight = max_in_flight
        self._on_state = on_state
        self._insecure = insecure
        self._handlers: dict[str, tuple[Handler, int]] = {}
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # `stop` against a fall-back in the network thread
        self._up = threading.Event()
        self._subscribing: int | None = None  # id of the packet with our subscriptions
        self._refused = False
        self._left = threading.Event()  # the broker has ended a subscription
        self._stopped = False
        self._failures = 0
        self._last_error = "no connection attempt yet"
        self._protocol = MQTTProtocolVersion.MQTTv5 if mqtt5 else MQTTProtocolVersion.MQTTv311
        self._client: Client | None = None
        self._newest: paho.MQTTMessageInfo | None = None
        self._backlog = Backlog(QUEUED_TIMES * max_in_flight)

    @property
    def connected(self) -> bool:
        """Whether the connection is up and subscribed."""
        return self._up.is_set()

    @property
    def last_error(self) -> str:
        """Why the link was last down, for people."""
        return self._last_error

    @property
    def refused(self) -> bool:
        """Whether the broker refused one of the subscriptions."""
        return self._refused

    @property
    def unacknowledged(self) -> int:
        """Number of messages of QoS 1 that the broker has not acknowledged."""
        return self._backlog.unacknowledged()

    def behind_s(self, now: float) -> float:
        """Age of the oldest message of QoS 1 that the broker has not acknowledged.

        It is 0 if there is none. A message that is published now waits about as long, whatever its
        QoS is: one connection keeps the order.

        Args:
            now: the monotonic clock.
        """
        return self._backlog.behind_s(now)

    def subscribe(self, topic_filter: str, handler: Handler, *, qos: int = 1) -> None:
        """Call `handler` in the network thread for each message, also after a reconnect."""
        with self._lock:
            self._handlers[topic_filter] = (handler, qos)
            client = self._client
        if client is not None:
            self._attach(client, topic_filter, handler)
            if client.is_connected():
                client.subscribe(topic_filter, qos)

    def unsubscribe(self, topic_filter: str, timeout_s: float) -> None:
        """End a subscription; returns once the broker has said so, or after `timeout_s`.

        Messages that come until then still reach the handler. One thread at a time may call this.
        """
        with self._lock:
            self._handlers.pop(topic_filter, None)
            client = self._client
        if client is not None and client.is_connected():
            self._left.clear()
            client.unsubscribe(topic_filter)
            self._left.wait(timeout_s)

    def start(self) -> None:
        """Connect in the background and stay connected until `stop`.

        Raises: ConfigurationError for a certificate file that cannot be used.
        """
        if self._password and not self._insecure and is_clear(self.address.url):
            self._last_error = clear_text_reason(self.address.url)
            logger.error("%s does not connect: %s", self._client_id, self._last_error)
            return
        with self._changing:
            if self._client is None:
                self._start_client()

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until the link is up.

        Raises: LinkError with the reason if it is not.
        """
        if not self._up.wait(timeout_s):
            raise LinkError(
                f"no broker at {self.address.url} after {timeout_s:g} s: {self._last_error}"
            )

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 1,
        retain: bool = False,
        rpc: Rpc | None = None,
    ) -> bool:
        """Write `payload` to the socket, or queue it for the network thread.

        At QoS 0 it may be lost without notice: with the connection, or where a broker holds too
        much for a receiver.

        Returns: False if the link is down or its queue is full; then nothing is queued.
        Raises: FrameTooLargeError above `max_packet_bytes`.
        """
        if len(payload) > self._max_packet_bytes:
            raise FrameTooLargeError(
                f"{topic}: at most {self._max_packet_bytes} bytes over MQTT, got {len(payload)}"
            )
        client = self._client
        if (
            client is None
            or not self.connected
            or (not qos and self._backlog.is_full(len(payload)))
        ):
            return False
        properties = self._properties(rpc)
        sent = client.publish(topic, payload, qos=qos, retain=retain, properties=properties)
        self._newest = sent
        if sent.rc != paho.MQTT_ERR_SUCCESS:
            return False
        if not self.address.tls:
            # A change of threads would take 50 to 100 us of an offload. Not with TLS: a connection
            # must not be read and written at once there (Python before 3.13.1 has no lock).
            client.write_now()
        self._backlog.add(sent, qos, len(payload))
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until the broker has the newest message (QoS 1), or it is written out (QoS 0).

        Returns: whether it was within the time.
        """
        newest = self._newest
        if newest is None:
            return True
        try:
            newest.wait_for_publish(timeout_s)
        except (RuntimeError, ValueError):  # it was refused: the queue was full
            return False
        return newest.is_published()

    def stop(self, *, last_words: Will | None = None, timeout_s: float = 2.0) -> None:
        """Publish `last_words` (retained) if connected, disconnect and end the network thread."""
        with self._changing:
            self._stopped = True
            client, self._client = self._client, None
        if client is None:
            return
        if last_words is not None and self.connected:
            info = client.publish(last_words.topic, last_words.payload, qos=1, retain=True)
            try:
                info.wait_for_publish(timeout_s)
            except (RuntimeError, ValueError):
                logger.debug("%s: broker gone before the last words", self._client_id)
        client.end_soon()
        client.disconnect()
        # paho's thread ends once all is written, which never happens if the peer does not read
        cut = threading.Timer(CUT_AFTER_S, client.cut_off)
        cut.start()
        client.loop_stop()
        cut.cancel()
        cut.join()
        self._up.clear()

    def _start_client(self) -> None:
        self._backlog.forget_under_way()
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._client_id,
            protocol=self._protocol,
        )
        if self._username:
            client.username_pw_set(self._username, self._password)
        if self._will is not None:
            client.will_set(self._will.topic, self._will.payload, qos=1, retain=True)
        if self.address.tls:
            self._secure(client)
            client.tls_insecure_set(self._pinned is not None)  # checks all but the name
        client.max_queued_messages_set(QUEUED_TIMES * self._max_in_flight)
        client.max_inflight_messages_set(self._max_in_flight)
        client.on_connect = self._connected
        client.on_subscribe = self._subscribed
        client.on_unsubscribe = self._unsubscribed
        client.on_connect_fail = self._connect_failed
        client.on_disconnect = self._disconnected
        with self._lock:
            for topic_filter, (handler, _) in self._handlers.items():
                self._attach(client, topic_filter, handler)
            self._client = client
        self._set_delay(client)
        client.connect_async(self.address.host, self.address.port, keepalive=self._keepalive_s)
        client.loop_start()

    def _attach(self, client: paho.Client, topic_filter: str, handler: Handler) -> None:
        def receive(_client: paho.Client, _userdata: object, received: paho.MQTTMessage) -> None:
            payload = bytes(received.payload)
            message = Message(received.topic, payload, received.retain, received.qos)
            try:
                handler(message)
            except Exception:  # outermost loop of the network thread: it must go on
                logger.exception("handler of %s failed", topic_filter)

        client.message_callback_add(_topics_of(topic_filter), receive)

    def _properties(self, rpc: Rpc | None) -> Properties | None:
        if rpc is None or self._protocol != MQTTProtocolVersion.MQTTv5:
            return None
        return cast("Properties", RpcProperties(rpc))  # paho only calls `pack`

    def _connected(
        self,
        client: paho.Client,
        _userdata: object,
        _flags: object,
        reason: ReasonCode,
        _properties: object,
    ) -> None:
        if reason.is_failure:
            self._last_error = f"the broker refused the connection: {reason}"
            if str(reason) == UNSUPPORTED_PROTOCOL and self._protocol == MQTTProtocolVersion.MQTTv5:
                self._fall_back(cast("Client", client))
            elif self._failures == 0:
                logger.warning("%s: %s", self._client_id, self._last_error)
            return
        self._failures = 0
        self._set_delay(client)
        with self._lock:
            wanted = [(topic_filter, qos) for topic_filter, (_, qos) in self._handlers.items()]
        if wanted:
            self._subscribing = client.subscribe(wanted)[1]
        else:
            self._come_up()

    def _subscribed(
        self,
        _client: paho.Client,
        _userdata: object,
        number: int,
        reasons: list[ReasonCode],
        _properties: object,
    ) -> None:
        refused = [str(reason) for reason in reasons if reason.is_failure]
        if refused:
            self._refused = True
            logger.warning("%s: a subscription was refused: %s", self._client_id, refused[0])
        if number == self._subscribing:
            self._come_up()

    def _unsubscribed(
        self,
        _client: paho.Client,
        _userdata: object,
        _number: int,
        _reasons: list[ReasonCode],
        _properties: object,
    ) -> None:
        self._left.set()

    def _come_up(self) -> None:
        """Report the link as up. Earlier, a reply could arrive before its subscription."""
        self._backlog.forget_unwritten()  # also one that was queued while the connection broke
        self._up.set()
        logger.debug("%s: connected to %s", self._client_id, self.address.url)
        if self._on_state is not None:
            self._on_state(True)

    def _fall_back(self, client: Client) -> None:
        logger.debug("%s: %s speaks MQTT 3.1.1", self._client_id, self.address.url)
        self._protocol = MQTTProtocolVersion.MQTTv311
        client.on_disconnect = None
        client.end_soon()
        client.disconnect()  # its thread ends by itself once this callback returns
        with self._changing:
            if not self._stopped:
                self._start_client()

    def _connect_failed(self, client: paho.Client, _userdata: object) -> None:
        # paho calls this while it handles the exception, and does not pass it on
        self._last_error = why_unreachable(sys.exc_info()[1], self.address.host)
        self._failures += 1
        self._set_delay(client)

    def _disconnected(
        self,
        client: paho.Client,
        _userdata: object,
        _flags: object,
        reason: ReasonCode,
        _properties: object,
    ) -> None:
        was_up = self._up.is_set()
        self._up.clear()
        self._backlog.forget_unwritten()
        self._failures += 1
        self._set_delay(client)
        if was_up:
            self._last_error = (
                "the connection was closed here" if self._stopped else why_lost(reason)
            )
            if self._on_state is not None:
                self._on_state(False)

    def _secure(self, client: paho.Client) -> None:
        if self._pinned is not None:
            client.tls_set_context(pinned_tls_context(Path(self._pinned)))
            return
        context = tls_context(None if self._ca is None else Path(self._ca))
        client.tls_set_context(context)
        if self._ca is not None:
            # before each attempt: a clock may be set right, or jump, while this link lives
            client.on_pre_connect = lambda *_: set_date_checks(context, not clock_is_wrong())

    def _set_delay(self, client: paho.Client) -> None:
        bound = min(RECONNECT_FIRST_S * 2 ** min(self._failures, 10), RECONNECT_LAST_S)
        delay_s = random.uniform(bound / 2, bound)  # noqa: S311 - jitter, not a secret
        client.reconnect_delay_set(delay_s, delay_s)  # type: ignore[arg-type]  # paho means seconds


def _topics_of(topic_filter: str) -> str:
    """The filter of the topics themselves: messages of `$share/GROUP/FILTER` come on those."""
    return topic_filter.split("/", 2)[2] if topic_filter.startswith("$share/") else topic_filter
