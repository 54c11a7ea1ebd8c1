"""The routes of membership and of the link: what one device cannot do to the others."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest

from edge_sdk.errors import LinkError
from edge_sdk.wire.address import Address
from server.fleet_broker import FleetBroker
from server.routes.membership import CREDENTIALS
from server.routes.turns import TURN_S, TURNS
from server.settings import ServerSettings
from tests.serving.routes.test_devices import OPERATOR, World, refused

SOON_S = 1.5


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@asynccontextmanager
async def client_of(world: World, login: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(world.app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {login}"}
    url = "http://server/api/v1"
    async with httpx.AsyncClient(transport=transport, base_url=url, headers=headers) as client:
        yield client


def test_bodies_that_never_end_keep_no_change_waiting(world: World) -> None:
    login = world.enrol()

    async def run() -> tuple[int, float]:
        ended = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b"x"
            await ended.wait()

        async with client_of(world, login) as pi, client_of(world, OPERATOR) as operator:
            echoes = [
                asyncio.create_task(pi.post("/link/echo", content=slowly())) for _ in range(TURNS)
            ]
            await asyncio.sleep(0.3)  # they are under way
            began = time.monotonic()
            status = (await operator.post("/tokens", json={})).status_code
            took_s = time.monotonic() - began
            ended.set()
            await asyncio.gather(*echoes)
            return status, took_s

    status, took_s = asyncio.run(run())
    assert status == 201
    assert took_s < TURN_S / 2


def test_orders_that_wait_for_a_held_database_keep_no_read_waiting(
    world: World, tmp_path: Path
) -> None:
    login = world.enrol()
    assert world.call("GET", "/devices/pi", login=login).status_code == 200  # it was seen

    async def run() -> float:
        async with client_of(world, login) as pi:
            with closing(sqlite3.connect(tmp_path / "registry.db", isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                done = [
                    asyncio.create_task(pi.post("/devices/pi/orders/done", json={"op": "rotate"}))
                    for _ in range(60)
                ]
                await asyncio.sleep(0.3)
                began = time.monotonic()
                assert (await pi.get("/devices/pi")).status_code == 200
                took_s = time.monotonic() - began
            await asyncio.gather(*done)
            return took_s

    assert asyncio.run(run()) < SOON_S


def test_a_device_cannot_fill_the_audit_log_with_new_credentials(world: World) -> None:
    login = world.enrol()
    answers = [
        world.call("POST", "/devices/pi/credential", login=login) for _ in range(CREDENTIALS + 3)
    ]
    assert [one.status_code for one in answers] == [201] * CREDENTIALS + [429] * 3
    assert "new credentials within" in refused(answers[-1], 429)
    assert int(answers[-1].headers["Retry-After"]) > 0
    written = world.registry.trail.entries(what="credential.new")
    assert len(written) == CREDENTIALS


@pytest.mark.parametrize("name", ["p" * 63 + "i", "Pi", "pi%00", "pi_"])
def test_a_name_that_is_no_id_names_no_device(world: World, name: str) -> None:
    world.enrol("p" * 63)
    for verb in ("approve", "reject", "rotate"):
        text = refused(world.call("POST", f"/devices/{name}/{verb}", login=OPERATOR), 404)
        assert "not enrolled here" in text


def test_an_order_that_no_device_can_have_is_refused(world: World) -> None:
    # PostgreSQL takes no NUL in a text
    login = world.enrol()
    body = {"op": "rotate", "argument": "a\0b"}
    refused(world.call("POST", "/devices/pi/orders/done", body, login), 400)


def test_a_broker_that_is_away_is_said_and_the_credential_is_confirmed_later(world: World) -> None:
    login = world.enrol()
    new = world.call("POST", "/devices/pi/credential", login=login).json()["credential"]
    world.broker_error = LinkError("Mosquitto is away: 10.0.0.7")
    told = world.call("POST", "/devices/pi/credential/confirm", login=f"pi:{new}")
    assert "try again" in refused(told, 503)
    assert "10.0.0.7" not in told.text
    assert told.headers["Retry-After"] == "1"
    world.broker_error = None
    again = world.call("POST", "/devices/pi/credential/confirm", login=f"pi:{new}")
    assert again.status_code == 204
    assert world.let_in[-1] == "pi"


def test_a_credential_that_is_not_confirmed_is_not_told_to_the_broker(world: World) -> None:
    login = world.enrol()
    new = world.call("POST", "/devices/pi/credential", login=login).json()["credential"]
    world.let_in.clear()
    for either, told in ((f"pi:{new}", []), (login, ["pi"])):
        reply = world.call("GET", "/devices/pi/approval", login=either)
        assert reply.json() == {"approved": True}
        assert world.let_in == told


def test_a_device_that_is_revoked_while_it_logs_in_stays_out(world: World, tmp_path: Path) -> None:
    """FAULTS row 24: what a request knew before the revocation does not bring the device back."""
    _, credential = world.enrol().split(":")
    nowhere = Address("127.0.0.1", 0)
    settings = ServerSettings(tmp_path, http=nowhere, broker=nowhere)
    broker = FleetBroker(settings, world.registry, lambda _event: None)
    before = world.registry.device("pi")
    broker.admit(before, credential)
    assert [one.id for one in broker.devices] == ["pi"]
    world.registry.revoke("pi")
    broker.expel("pi")
    broker.admit(before, credential)  # by a request that was let in before
    assert broker.devices == []
