"""The name in the audit log of who was refused: never a secret that stood in its place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from starlette.responses import PlainTextResponse

from server.audit.requests import AuditRequests
from server.registry.keys import PREFIX

if TYPE_CHECKING:
    from server.registry.trail.events import Event

SECRET = "vX9_" * 10 + "q-J"


class Log:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.parametrize(
    ("login", "name"),
    [
        ("pi-1:wrong", "pi-1"),
        ("operator:wrong", "operator"),
        (f"{PREFIX}{SECRET}:", ""),
        (f"{PREFIX}{SECRET}:pi-1", ""),
        (f"A{SECRET}:pi-1", ""),
        (SECRET, ""),
        ("pi\n-1:wrong", ""),
    ],
)
def test_a_secret_in_the_place_of_a_name_is_left_out(login: str, name: str) -> None:
    log = Log()
    app = AuditRequests(PlainTextResponse("no", 401), cast("Any", log))

    async def once() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await client.get("/api/v1/load", headers={b"Authorization": f"Bearer {login}".encode()})

    asyncio.run(once())
    assert [event.who for event in log.events] == [name]
