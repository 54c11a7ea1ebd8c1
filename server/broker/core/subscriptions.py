"""Topic filters and who subscribed to them. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, TypeVar

Subscriber = TypeVar("Subscriber")

SHARED_PREFIX: Final = "$share/"
_ONE: Final = "+"
_REST: Final = "#"
_REMEMBERED: Final = 4_096  # topics whose subscribers are remembered
_REMEMBERED_CHARACTERS: Final = 160  # of such a topic; one of ours has at most 148


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a topic matches a filter (4.7); a wildcard in front matches no topic with a `$`."""
    if topic_filter == topic:
        return True
    if topic[0] == "$" and topic_filter[0] in (_ONE, _REST):
        return False
    asked, levels = topic_filter.split("/"), topic.split("/")
    for place, level in enumerate(asked):
        if level == _REST:
            return True
        if place == len(levels) or level not in (_ONE, levels[place]):
            return False
    return len(asked) == len(levels)


class _Node(Generic[Subscriber]):
    """A level of the filters with wildcards: what comes after it, and who ends here."""

    __slots__ = ("after", "here")

    def __init__(self) -> None:
        self.after: dict[str, _Node[Subscriber]] = {}
        self.here: dict[Subscriber, int] = {}


class Subscriptions(Generic[Subscriber]):
    """The subscribers of each topic filter, each with its QoS.

    Filters without wildcards are looked up at once; the others lie in a tree of levels.
    """

    def __init__(self) -> None:
        self._exact: dict[str, dict[Subscriber, int]] = {}
        self._root: _Node[Subscriber] = _Node()
        self._found: dict[str, dict[Subscriber, int]] = {}  # by topic, until a subscription changes

    def add(self, topic_filter: str, subscriber: Subscriber, qos: int) -> None:
        """Subscribe, or change the QoS of a subscription. The filter is a valid one."""
        self._found.clear()
        if _ONE not in topic_filter and _REST not in topic_filter:
            self._exact.setdefault(topic_filter, {})[subscriber] = qos
            return
        node = self._root
        for level in topic_filter.split("/"):
            node = node.after.setdefault(level, _Node())
        node.here[subscriber] = qos

    def remove(self, topic_filter: str, subscriber: Subscriber) -> None:
        """End a subscription, if there is one."""
        self._found.clear()
        if _ONE not in topic_filter and _REST not in topic_filter:
            exact = self._exact.get(topic_filter, {})
            exact.pop(subscriber, None)
            if not exact:
                self._exact.pop(topic_filter, None)
            return
        path = [self._root]
        levels = topic_filter.split("/")
        for level in levels:
            if level not in path[-1].after:
                return
            path.append(path[-1].after[level])
        path[-1].here.pop(subscriber, None)
        for parent, level in zip(reversed(path[:-1]), reversed(levels), strict=True):
            child = parent.after[level]
            if child.here or child.after:
                return
            del parent.after[level]

    def of(self, topic: str) -> Mapping[Subscriber, int]:
        """The subscribers of a topic, each with the highest QoS of its filters that match.

        The mapping stays as it is when subscriptions change.
        """
        found = self._found.get(topic)
        if found is None:
            found = self._find(topic)
            if len(topic) <= _REMEMBERED_CHARACTERS:
                if len(self._found) >= _REMEMBERED:
                    self._found.clear()
                self._found[topic] = found
        return found

    def _find(self, topic: str) -> dict[Subscriber, int]:
        found = dict(self._exact.get(topic, ()))
        if self._root.after:
            for node in self._matching(topic):
                for subscriber, qos in node.here.items():
                    if found.get(subscriber, -1) < qos:
                        found[subscriber] = qos
        return found

    def _matching(self, topic: str) -> list[_Node[Subscriber]]:
        """The ends of the filters with wildcards that match."""
        levels = topic.split("/")
        nodes, ends = [self._root], []
        for place, level in enumerate(levels):
            wild = place > 0 or not level.startswith("$")
            after = []
            for node in nodes:
                if wild and (rest := node.after.get(_REST)) is not None:
                    ends.append(rest)
                if wild and (one := node.after.get(_ONE)) is not None:
                    after.append(one)
                if (same := node.after.get(level)) is not None:
                    after.append(same)
            nodes = after
            if not nodes:
                return ends
        for node in nodes:
            ends.append(node)
            if (rest := node.after.get(_REST)) is not None:  # "a/#" matches "a" too
                ends.append(rest)
        return ends
