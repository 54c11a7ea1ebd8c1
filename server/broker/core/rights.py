"""Permissions of a client: the broker asks for them at login, and obeys them from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from server.broker.core.packets import Connect


class Rights(Protocol):
    """Permissions of one client. Two logins of the same client have equal rights.

    Attributes:
        name: the user, under which its logins are counted.
        trusted: no budget applies, and it is not cut because much waits for it.
        held_back: it is not read from while too many of its messages are undelivered.
    """

    @property
    def name(self) -> str: ...

    @property
    def trusted(self) -> bool: ...

    @property
    def held_back(self) -> bool: ...

    def may_publish(self, topic: str) -> bool:
        """Whether it may publish to the topic, wills included."""
        ...

    def may_subscribe(self, topic_filter: str) -> bool:
        """Whether it may subscribe to the topic filter."""
        ...

    def may_retain(self, topic: str) -> bool:
        """Whether its messages on the topic may be retained."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """A login that is refused, for the log; the client is told nothing of it.

    Attributes:
        why: without a secret.
        client_id: to be logged; empty where the client's own is a secret.
        swapped: whether it came with a credential of another principal.
    """

    why: str
    client_id: str
    swapped: bool = False


Authenticate = Callable[[Connect], Rights | Refusal]
