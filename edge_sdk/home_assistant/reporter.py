"""Reporter of an agent to Home Assistant: it announces the device, and publishes its state.

A thread of its own publishes, so that neither `predict` nor the network thread waits. A broker that
is away is no fault: the device appears, with its newest state, once it is back.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import orjson

from edge_sdk.answers.observer import Answered, AnswerObserver
from edge_sdk.answers.prediction import Prediction
from edge_sdk.answers.status import Status
from edge_sdk.errors import LinkError, SplitedgeError
from edge_sdk.home_assistant.address import HomeAddress
from edge_sdk.home_assistant.discovery import (
    OFFLINE,
    ONLINE,
    Described,
    State,
    Topics,
    discovery_message,
    object_id,
    read_command,
    state_text,
)
from edge_sdk.installation import installed_version
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message, Will

if TYPE_CHECKING:
    from edge_sdk.agent import EdgeAgent

logger = logging.getLogger(__name__)

# Home Assistant stores every state, so changes come at most this often.
CHANGE_S: Final = 1.0
# The state of the server and the device is looked at this often.
LOOK_S: Final = 2.0
# The exit rate is that of the answers within this time.
RATE_S: Final = 300.0
# After its birth message Home Assistant is busy, and all devices answer it.
BIRTH_JITTER_S: Final = 1.0


class ExitRate:
    """Share of the answers that exited on the device, over the last RATE_S seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def percent(self, now: float, exits: int, answers: int) -> float | None:
        """The share up to now; None without an answer in that time.

        Args:
            now: monotonic seconds.
            exits, answers: counts since the agent's start.
        """
        seen = self._seen
        seen.append((now, exits, answers))
        while len(seen) > 1 and seen[1][0] <= now - RATE_S:
            seen.popleft()
        before = seen[0]
        given = answers - before[2]
        if len(seen) == 1:  # the first look: all answers so far
            before, given = (now, 0, 0), answers
        return round(100 * (exits - before[1]) / given, 1) if given > 0 else None

    def leave_out(self, now: float, exits: int, answers: int) -> None:
        """Leave out all answers up to now: with offloading switched off, they are no exits."""
        self._seen = deque([(now, exits, answers)])


class HomeReporter(AnswerObserver):
    """One device in Home Assistant, for as long as its agent runs.

        with HomeReporter(agent, HomeAddress.parse("mqtt://ha.local", Path())) as reporter:
            agent.add_observer(reporter)

    Raises: ConfigurationError for a certificate file that cannot be used.
    """

    name = "home_assistant"

    def __init__(self, agent: EdgeAgent, address: HomeAddress) -> None:
        self._agent = agent
        self._address = address
        self._switchable = agent.status().presence != "no server"
        device = agent.status().device or agent.manifest.model
        self._device = device
        self._topics = topics = Topics.of(device, address.prefix, address.birth)
        self._rate = ExitRate()
        self._last: Prediction | None = None
        self._smoothed: str | None = None
        self._smoothed_label: int | None = None
        self._shown: tuple[object, ...] | None = None
        self._bundle = ""
        self._wake = threading.Condition()
        self._announce_at, self._sent_at = 0.0, float("-inf")
        self._look_at = time.monotonic()
        self._wanted: bool | None = None  # of the switch
        self._closing = False
        self._link = MqttLink(
            address.broker,
            client_id=object_id(device),
            username=address.broker.username or "",
            password=address.broker.password,
            will=Will(topics.availability, OFFLINE),
            ca=None if address.ca is None else str(address.ca),
            on_state=self._link_changed,
            insecure=True,  # the user names the broker and its login by URL
        )
        if self._switchable:
            self._link.subscribe(topics.command, self._command)
        self._link.subscribe(topics.birth, self._born)
        self._thread = threading.Thread(target=self._run, name="home-assistant", daemon=True)

    def __enter__(self) -> Self:
        self._link.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # of the observer; `answered` runs in the thread of `predict`

    def answered(self, answered: Answered) -> None:
        """Note an answer; one with another label or source is shown soon."""
        before, now = self._last, answered.prediction
        self._last = now
        new = self._smoothed is None and (before is None or before.label != now.label)
        if new or before is None or before.source != now.source:
            self._look_soon(self._pause_s())

    def smoothed(self, row: Mapping[str, Any]) -> None:
        """Note the label of a stream with smoothing, which is shown in place of the answer's."""
        before, self._smoothed = self._smoothed, row.get("smoothed_class_name")
        self._smoothed_label = row.get("smoothed_label")
        if self._smoothed != before:
            self._look_soon(self._pause_s())

    def report(self) -> Mapping[str, Any]:
        """State of the link to Home Assistant's broker, for people."""
        up = self._link.connected
        return {
            "broker": self._address.broker.url,
            "connected": up,
            "away": "" if up else self._link.last_error,
        }

    def close(self) -> None:
        """Say that the device is offline, and disconnect. A second call does nothing."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._link.stop(last_words=Will(self._topics.availability, OFFLINE))

    # of the network thread

    def _link_changed(self, up: bool) -> None:
        if up:
            self._announce_at = 0.0
            self._look_soon(0.0)
            logger.info("device=%s is announced to Home Assistant", self._device)
        else:
            logger.info("device=%s Home Assistant's broker is away", self._device)

    def _born(self, message: Message) -> None:
        # a retained birth message is older than this connection, which has announced already
        if message.payload == ONLINE and not message.retained:
            jitter_s = random.uniform(0, BIRTH_JITTER_S)  # noqa: S311 - jitter, not a secret
            self._announce_at = time.monotonic() + jitter_s
            self._look_soon(jitter_s)

    def _command(self, message: Message) -> None:
        on = read_command(message.payload)
        if on is None or message.retained:
            # a retained command would turn the switch back after every restart
            logger.warning("device=%s a command for offloading was refused", self._device)
            return
        self._wanted = on  # the disk is written in the other thread
        self._look_soon(0.0)

    # of the reporter's own thread

    def _run(self) -> None:
        while self._wait():
            try:
                self._turn()
                self._look()
            except LinkError as err:  # the broker went away in this moment
                logger.debug("device=%s %s", self._device, err)
            except Exception:  # outermost loop of this thread: one failed report is not the last
                logger.exception("device=%s a report to Home Assistant failed", self._device)

    def _wait(self) -> bool:
        """Wait until it is time to look. Returns: False at the end."""
        with self._wake:
            while not self._closing and (left_s := self._look_at - time.monotonic()) > 0:
                self._wake.wait(left_s)
            self._look_at = time.monotonic() + LOOK_S
            return not self._closing

    def _turn(self) -> None:
        on, self._wanted = self._wanted, None
        if on is not None:
            try:
                self._agent.offloading = on
            except SplitedgeError as err:
                logger.warning("device=%s %s", self._device, err)

    def _look(self) -> None:
        """Announce the device and publish its state, as far as there is something new."""
        if not self._link.connected:
            return
        now, manifest = time.monotonic(), self._agent.manifest
        announce = now >= self._announce_at or manifest.bundle != self._bundle
        if announce:
            about = Described(
                self._device,
                self._address.name or self._device,
                manifest.bundle,
                tuple(map(state_text, manifest.class_names)),
                self._switchable,
                installed_version(),
            )
            message = orjson.dumps(discovery_message(about, self._topics))
            self._send(self._topics.discovery, message)
            self._send(self._topics.availability, ONLINE)
            self._announce_at, self._bundle = float("inf"), manifest.bundle
        state = self._state(self._agent.status())
        if announce or state.face != self._shown or now >= self._sent_at + self._address.every_s:
            self._send(self._topics.state, orjson.dumps(state.message()))
            self._shown, self._sent_at = state.face, now

    def _send(self, topic: str, payload: bytes) -> None:
        """Raises: LinkError if the link does not take it; the next look tries again."""
        if not self._link.publish(topic, payload, retain=True):
            raise LinkError(f"not sent: {self._link.last_error}")

    def _state(self, status: Status) -> State:
        last = self._last
        return State(
            answer=self._label(),
            confidence=self._confidence(),
            source=None if last is None else last.source,
            exit_rate=self._exit_rate(status),
            latency_ms=None if last is None else round(last.latency_ms, 3),
            bundle=status.bundle,
            server=status.presence == "present",
            offloading=status.offloading,
            why=status.trouble or status.clock,
        )

    def _exit_rate(self, status: Status) -> float | None:
        now, counters = time.monotonic(), status.counters
        if status.offloading:
            return self._rate.percent(now, counters.device, counters.total)
        self._rate.leave_out(now, counters.device, counters.total)
        return None

    def _label(self) -> str | None:
        last = self._last
        return None if last is None else state_text(self._smoothed or last.class_name)

    def _confidence(self) -> float | None:
        """Probability of the class that is shown, by the last answer, in percent."""
        last, smoothed = self._last, self._smoothed_label
        if last is None:
            return None
        label = last.label if smoothed is None else smoothed
        if label >= len(last.probabilities):  # smoothed before an update to fewer classes
            return None
        return round(100 * float(last.probabilities[label]), 1)

    def _pause_s(self) -> float:
        """Time until a change may be shown."""
        return max(0.0, self._sent_at + CHANGE_S - time.monotonic())

    def _look_soon(self, in_s: float) -> None:
        with self._wake:
            self._look_at = min(self._look_at, time.monotonic() + in_s)
            self._wake.notify_all()
