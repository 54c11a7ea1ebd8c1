"""Retained messages, within bounds for each client and for all. Pure: no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from server.broker.core.limits import BrokerLimits
from server.broker.core.session import Message
from server.broker.core.subscriptions import matches


class RetainedMessages:
    """The last retained message of each topic, and whose it is."""

    def __init__(self, limits: BrokerLimits) -> None:
        self._limits = limits
        self._kept: dict[str, tuple[str, Message]] = {}  # owner and message, by topic
        self._of_owner: Counter[str] = Counter()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Size of all of them."""
        return self._bytes

    def keep(self, owner: str, message: Message) -> bool:
        """Retain a message in place of the topic's last; an empty one ends that (3.3.1.3).

        Returns: False where a limit forbids it; then the topic has no retained message.
        """
        self._remove(message.topic)
        if not message.payload:
            return True
        limits = self._limits
        if (
            len(message.payload) > limits.retained_bytes
            or self._of_owner[owner] >= limits.retained_messages
            or len(self._kept) >= limits.fleet_retained_messages
            or self._bytes + message.size_bytes > limits.fleet_retained_bytes
        ):
            return False
        self._kept[message.topic] = owner, message
        self._of_owner[owner] += 1
        self._bytes += message.size_bytes
        return True

    def matching(self, topic_filter: str) -> Iterator[Message]:
        """The retained messages on the topics of a filter."""
        if "+" not in topic_filter and "#" not in topic_filter:
            if (found := self._kept.get(topic_filter)) is not None:
                yield found[1]
            return
        for topic, (_, message) in self._kept.items():
            if matches(topic_filter, topic):
                yield message

    def forget(self, owner: str) -> None:
        """Drop all messages of a client."""
        for topic in [topic for topic, (whose, _) in self._kept.items() if whose == owner]:
            self._remove(topic)

    def _remove(self, topic: str) -> None:
        before = self._kept.pop(topic, None)
        if before is None:
            return
        owner, message = before
        self._bytes -= message.size_bytes
        self._of_owner[owner] -= 1
        if not self._of_owner[owner]:
            del self._of_owner[owner]
