"""HTTP: a sender whose queries the queue refuses is refused before anything is paid for them."""

from __future__ import annotations

from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from server.access.rules import Login
from server.backend.senders import Senders
from server.errors import OverloadedError
from server.overload.early_refusals import EarlyRefusals
from tests.clock import Clock

INFER = "/v2/models/digits/infer"
# the name of a key is that of its sender; here the operator, who needs no record
SENDER = Login().name


class World:
    """The middleware in front of an application that lets every login in, and reads bodies."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.senders = Senders(clock=self.clock)
        self.served: list[str] = []
        self.read = 0
        self._early = EarlyRefusals(self._serve, self.senders)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.served.append(scope["path"])
        await receive()
        if dict(scope["headers"]).get(b"authorization") == b"Bearer right":
            scope.setdefault("state", {})["login"] = Login()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, path: str = INFER, header: bytes = b"Bearer right") -> dict[str, Any]:
        """Send a request; what its answer starts with."""
        sent: list[Any] = []

        async def receive() -> Any:
            self.read += 1
            return {"type": "http.request", "body": b"x" * 10, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", header), (b"content-length", b"10")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        anyio.run(self._early, scope, receive, send)
        answer: dict[str, Any] = sent[0]
        return answer


def test_a_refused_sender_costs_neither_login_nor_body_until_its_time_is_over() -> None:
    """FAULTS row 8."""
    world = World()
    assert world.ask()["status"] == 200
    world.senders.settled(SENDER, OverloadedError("full", retry_after_s=4.0))
    answer = world.ask()
    assert answer["status"] == 429
    assert (b"retry-after", b"4") in answer["headers"]
    assert (len(world.served), world.read) == (1, 1)
    assert world.senders.counts()[SENDER].refused == 2
    world.clock.now += 0.21
    assert world.ask()["status"] == 200


def test_a_header_that_opened_nothing_is_nobodys_and_other_requests_pass() -> None:
    world = World()
    world.ask()
    world.senders.settled(SENDER, OverloadedError("full", retry_after_s=4.0))
    assert world.ask(header=b"Bearer wrong")["status"] == 200  # the guard behind it refuses it
    assert world.ask(path="/v2/models/digits")["status"] == 200
    assert world.served == [INFER, INFER, "/v2/models/digits"]
