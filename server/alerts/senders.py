"""Senders of alerts: a webhook, and a topic of an MQTT broker.

Each has a queue and a thread of its own (`edge_sdk.pipeline.sinks.sink`): what cannot be sent
waits, is tried again with growing pauses, and holds up nobody. The registry keeps each message
until its receiver has it (`server.registry.alerts.notices`), so a message may come twice after a
crash, and none is lost.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.http import HttpClient, Timeout
from edge_sdk.pipeline.sinks.kinds import SINKS, topic_writer
from edge_sdk.pipeline.sinks.sink import Sink, SinkGoneError, Writer
from edge_sdk.pipeline.words import read_word, without_login
from server.alerts.limits import AlertLimits, host_of
from server.registry.alerts.notices import Notice

logger = logging.getLogger(__name__)

TIMEOUT: Final = Timeout(connect_s=5.0, read_s=5.0, total_s=10.0)
ANSWER_BYTES: Final = 65_536
TIME_HEADER: Final = "Splitedge-Time"
SIGNATURE_HEADER: Final = "Splitedge-Signature"
# what a later attempt may get another answer to
_AGAIN: Final = (408, 425, 429)
# messages that wait in memory; the others wait in the registry
ON_THE_WAY_MOST: Final = 64
WEBHOOK: Final = "webhook"
TOPIC: Final = "mqtt"
_ID: Final = "notice"  # of a message on its way; it is not sent


class WebhookWriter:
    """Posts each alert as JSON.

    Args:
        secret: signs time and body; None signs nothing.
    """

    def __init__(self, url: str, secret: bytes | None = None) -> None:
        self._url = url
        self._secret = secret
        self._client = HttpClient()

    def write(self, rows: Sequence[dict[str, Any]]) -> int:
        """Post the first row.

        Raises: LinkError if the receiver cannot be reached, or asks for another attempt.
        """
        body = orjson.dumps(rows[0])
        headers = {"Content-Type": "application/json"}
        if self._secret is not None:
            headers |= signed(body, self._secret, time.time())
        try:
            answer = self._client.request(
                "POST", self._url, headers=headers, body=body, timeout=TIMEOUT, at_most=ANSWER_BYTES
            )
        except LinkError as err:  # its text goes to the log, and the URL is often a secret
            raise LinkError(str(err).replace(self._url, host_of(self._url))) from None
        if answer.status >= 500 or answer.status in _AGAIN:
            raise LinkError(f"it answered {answer.status}")
        if answer.status >= 300:
            logger.warning(
                "webhook: an alert was refused with status %d, and is not sent again", answer.status
            )
        return 1

    def close(self, timeout_s: float) -> int:  # noqa: ARG002 - nothing is held
        """Close the connections."""
        self._client.close()
        return 0


def signed(body: bytes, secret: bytes, now: float) -> dict[str, str]:
    """Headers by which a receiver knows who sent a body, and when.

    The signature is `sha256=` and the HMAC-SHA-256, in hex, of the time, a dot, and the body.

    Args:
        now: UTC seconds since 1970.
    """
    at = str(int(now))
    digest = hmac.new(secret, at.encode() + b"." + body, hashlib.sha256).hexdigest()
    return {TIME_HEADER: at, SIGNATURE_HEADER: f"sha256={digest}"}


class Confirming:
    """A writer that remembers which messages its receiver has.

    Args:
        done: the ids of these messages; the last ones are added at its right end.
    """

    def __init__(self, writer: Writer, done: deque[int]) -> None:
        self._writer = writer
        self._done = done

    def write(self, rows: Sequence[dict[str, Any]]) -> int:
        """Write messages without their ids; raises what the writer raises."""
        bare = [{key: value for key, value in row.items() if key != _ID} for row in rows]
        try:
            written = self._writer.write(bare)
        except (LinkError, OSError, SinkGoneError):
            raise
        except Exception:  # the queue drops these, so they are not sent again
            self._done.extend(row[_ID] for row in rows)
            raise
        self._done.extend(row[_ID] for row in rows[:written])
        return written

    def close(self, timeout_s: float) -> int:
        """Close the writer."""
        return self._writer.close(timeout_s)


class Sender:
    """The way to one receiver.

    Args:
        name: for people.
    """

    def __init__(self, name: str, writer: Writer) -> None:
        self._done: deque[int] = deque()
        self._on_the_way: set[int] = set()
        self._sink = Sink(name, Confirming(writer, self._done))

    def send(self, notices: Sequence[Notice]) -> None:
        """Queue those that are not on their way, as far as there is room; it does not wait."""
        for notice in notices:
            if len(self._on_the_way) >= ON_THE_WAY_MOST:
                return
            if notice.id not in self._on_the_way:
                self._on_the_way.add(notice.id)
                self._sink.put({**message(notice), _ID: notice.id})

    def done(self) -> list[int]:
        """Ids of the messages that the receiver has, or refused for good; each is told until
        `forget`.
        """
        return list(self._done)

    def forget(self, ids: Sequence[int]) -> None:
        """Forget the oldest ids of `done`, once they are written down."""
        for _ in ids:
            self._on_the_way.discard(self._done.popleft())

    def close(self) -> None:
        """Send what waits, as far as it goes in two seconds."""
        self._sink.close()


def message(notice: Notice) -> dict[str, Any]:
    """The message that a receiver gets."""
    alert = notice.alert
    return {
        "alert": alert.id,
        "state": notice.state,
        "kind": alert.kind,
        "about": alert.about,
        "level": alert.level,
        "text": alert.text,
        "since": alert.opened_at,
    }


def open_senders(limits: AlertLimits, state: Path) -> dict[str, Sender]:
    """The senders that the limits name, by receiver.

    Args:
        state: paths of the limits start there.
    Raises: ConfigurationError for a secret or an address that cannot be used.
    """
    found: dict[str, Sender] = {}
    if limits.webhook is not None:
        secret = None
        if limits.webhook_secret is not None:
            secret = _secret(state / limits.webhook_secret)
        found[WEBHOOK] = Sender("webhook of alerts", WebhookWriter(limits.webhook, secret))
    if limits.mqtt is not None:
        kind = SINKS[limits.mqtt.partition(":")[0]]
        word = read_word(limits.mqtt, kind.keys)
        name = without_login(limits.mqtt.partition("?")[0])
        found[TOPIC] = Sender(name, topic_writer(word, state, confirmed=True))
    return found


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as err:
        raise ConfigurationError(f"webhook_secret {path}: cannot be read ({err.strerror})") from err
    if len(secret) < 16:
        raise ConfigurationError(
            f"webhook_secret {path}: expected at least 16 characters, got {len(secret)}; make one"
            " with `openssl rand -hex 32`"
        )
    return secret
