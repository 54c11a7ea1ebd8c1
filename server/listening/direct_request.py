"""Requests that a connection answers itself, without a task of the application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Fields = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        fields: names in lower case, and values; `content-length` among them.
    """

    status: int
    fields: Fields
    body: bytes


class DirectRequest(Protocol):
    """A request whose head was let in."""

    def serve(self, body: bytes, answered: Callable[[Answer], None]) -> None:
        """Answer it, on the event loop.

        Args:
            body: all of it.
            answered: called once, on the event loop; in this call, or later.
        """


class DirectRequests(Protocol):
    """Knows which requests a connection answers itself."""

    def admit(
        self, method: bytes, url: bytes, fields: Fields, client: tuple[str, int] | None
    ) -> DirectRequest | None:
        """The request with this head; None for one that is the application's.

        Nothing is counted yet: the application sees the requests that are not let in, and refuses
        them.

        Args:
            fields: of the head, names in lower case.
        """
