"""Logins of backends at a real Mosquitto: queries and replies, and nothing else."""

from __future__ import annotations

import itertools
import json
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from sqlalchemy import text as sql
from typer.testing import CliRunner, Result

from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.messages import pack_query
from edge_sdk.wire.topics import Kind
from server.broker.mosquitto import MosquittoAdmin
from server.broker.mosquitto_files import CONTROL, RESPONSE
from server.cli import app
from server.registry.connect import open_engine
from tests.reader import Document
from tests.serving.broker.test_isolation import (
    DEVICES,
    FROM_DEVICE,
    NOT_AUTHORISED,
    REFUSED,
    SECRET,
    TO_DEVICE,
    Client,
    World,
    clients_of,
    mosquitto,
    topic_of,
)
from tests.serving.conftest import ServerRun
from tests.serving.postgresql import PostgreSql
from tests.serving.roles.test_backends import FREE, is_ready
from tests.serving.roles.test_backends import World as Roles
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.long]

SHARED = "$share/splitedge/splitedge/v1/+/+/query"
PASSWORD = "of-a-backend"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with mosquitto(tmp_path_factory.mktemp("broker")) as running:
        for device in DEVICES[:3]:
            running.add(device, SECRET)
        yield running


@pytest.fixture
def admin(world: World) -> Iterator[MosquittoAdmin]:
    made = MosquittoAdmin(BrokerAddress("127.0.0.1", world.port), credential=SECRET)
    made.start()
    yield made
    for name in made.backends():
        made.remove_backend(name)
    made.stop()


@pytest.fixture
def connect(world: World) -> Iterator[Callable[..., Client]]:
    with clients_of(world) as connected:
        yield connected


@pytest.fixture
def backend(admin: MosquittoAdmin, connect: Callable[..., Client]) -> Client:
    admin.add_backend("one", PASSWORD)
    client = connect("backend.one-1", username="backend.one", password=PASSWORD)
    assert client.code == 0
    return client


def test_it_may_subscribe_to_the_shared_queries_alone(backend: Client) -> None:
    every = [
        topic_of(device, kind) for device in DEVICES[:3] for kind in (*FROM_DEVICE, *TO_DEVICE)
    ]
    wild = [f"splitedge/v1/+/+/{kind}" for kind in (*FROM_DEVICE, *TO_DEVICE)]
    others = [
        *("#", "+/#", "splitedge/#", "$SYS/#", "$SYS/broker/version", "$CONTROL/#", CONTROL),
        *(RESPONSE, "$share/splitedge/#", "$share/other/splitedge/v1/+/+/query"),
        *(f"$share/splitedge/splitedge/v1/+/+/{kind}" for kind in ("status", "telemetry")),
        f"$share/splitedge/{RESPONSE}",
    ]
    asked = [SHARED, *every, *wild, *others]
    codes = backend.subscribe(*asked)
    assert {name for name, code in zip(asked, codes, strict=True) if code != REFUSED} == {SHARED}


def test_it_hears_queries_and_says_replies_alone(
    backend: Client, connect: Callable[..., Client]
) -> None:
    one, two = (connect(device) for device in DEVICES[:2])
    server = connect("backend-test", username="backend")
    server.subscribe(*(f"splitedge/v1/+/+/{kind}" for kind in FROM_DEVICE))
    for client, device in ((one, DEVICES[0]), (two, DEVICES[1])):
        client.subscribe(*(topic_of(device, kind) for kind in TO_DEVICE))
    backend.subscribe(SHARED)

    for number, kind in enumerate(FROM_DEVICE, start=1):
        one.publish(topic_of(DEVICES[0], kind), kind.encode(), packet_id=number)
    one.publish(topic_of(DEVICES[0], "query"), b"end", packet_id=9)
    assert backend.heard_until(b"end") == [(topic_of(DEVICES[0], "query"), b"query")]

    # whatever it says, and as something to keep, too
    kinds = (*FROM_DEVICE, *TO_DEVICE)
    for number, kind in enumerate(kinds, start=1):
        for retain in (False, True):
            said = f"{kind} {retain}".encode()
            backend.publish(topic_of(DEVICES[1], kind), said, retain=retain, packet_id=number)
    backend.publish(topic_of(DEVICES[1], "reply"), b"end", packet_id=99)
    reply = topic_of(DEVICES[1], "reply")
    assert two.heard_until(b"end") == [(reply, b"reply False"), (reply, b"reply True")]
    two.publish(topic_of(DEVICES[1], "status"), b"end")
    heard = server.heard_until(b"end", times=2)  # of both devices
    assert {payload for topic, payload in heard} == {b"status", b"telemetry", b"query"}
    assert {topic.split("/")[3] for topic, _ in heard} == {DEVICES[0]}


def test_it_cannot_change_logins(
    backend: Client, admin: MosquittoAdmin, connect: Callable[..., Client]
) -> None:
    before = admin.devices(), admin.backends()
    order = {"command": "createClient", "username": "backend.two", "password": "mine"}
    gone = {"command": "deleteClient", "username": DEVICES[0]}
    backend.publish(CONTROL, json.dumps({"commands": [order, gone]}).encode())
    backend.acknowledged(1)
    assert (admin.devices(), admin.backends()) == before
    assert connect(DEVICES[0]).code == 0


def test_a_name_is_made_once_and_gone_when_revoked(
    backend: Client, admin: MosquittoAdmin, connect: Callable[..., Client]
) -> None:
    with pytest.raises(ConfigurationError, match="login one: a backend has it already"):
        admin.add_backend("one", "another")
    backend.subscribe(SHARED)
    admin.remove_backend("one")
    assert backend.is_cut(5)
    again = connect("backend.one-2", username="backend.one", password=PASSWORD)
    assert again.code == NOT_AUTHORISED
    with pytest.raises(ConfigurationError, match="login one: no backend has it"):
        admin.remove_backend("one")
    assert admin.backends() == []


def typed(line: str, state: Path, file: Path) -> Result:
    """A command of docs/scaling.md, with this state folder and this file of a password."""
    places = {"./server": str(state), "gpu-1.password": str(file)}
    _, _, *words = shlex.split(line)
    return CliRunner().invoke(app, [places.get(word, word) for word in words])


@pytest.mark.deadline
def test_a_backend_answers_by_a_login_of_its_own(exported: Exported, tmp_path: Path) -> None:
    """Made, listed and revoked by command; it stays when Mosquitto is killed and starts again."""
    state, file = tmp_path / "server", tmp_path / "one.password"
    create, listing, revoke = Document("docs/scaling.md").snippet("logins").splitlines()
    started = [
        ServerRun(state, [*FREE, "--mqtt", "mosquitto:127.0.0.1:0"], tmp_path / "a", role="api")
    ]
    try:
        api = started[0].wait_ready()
        exported.install(state / "models")
        made = typed(create, state, file)
        assert made.exit_code == 0, made.output + str(made.exception)
        words = made.stdout.split()
        assert words[-2:] == ["--state", str(state)]
        url = words[words.index("--mqtt") + 1]
        assert url.startswith("mqtt://backend.gpu-1@127.0.0.1:")
        assert file.stat().st_mode & 0o777 == 0o600
        options = [*FREE, "--mqtt", url, "--mqtt-password-file", str(file)]
        started.append(ServerRun(state, options, tmp_path / "b", role="backend"))
        backend = started[1].wait_ready()
        wait_until(lambda: is_ready(backend), backend.stderr, 30)

        device = Roles(state, api, [], "").device("pi")
        first = device.ask(exported.query(0, exported.x[:1], id="first"))
        assert "logits" in first.tensors
        assert typed(listing, state, file).stdout == "gpu-1\n"
        (broker,) = (p for p in psutil.Process(api.process.pid).children(recursive=True)
                     if p.name() == "mosquitto")  # fmt: skip
        broker.kill()

        count = itertools.count()

        def answered() -> bool:
            query = exported.query(0, exported.x[:1], id=f"again-{next(count)}")
            device.link.publish(device.topic(Kind.QUERY), pack_query(query))
            return any(reply.id.startswith("again-") for reply in device.replies)

        wait_until(answered, lambda: backend.stderr, 30)
        assert typed(listing, state, file).stdout == "gpu-1\n"
        assert typed(revoke, state, file).exit_code == 0
        wait_until(lambda: "ot authori" in backend.stderr, lambda: backend.stderr, 20)
        assert "no logins yet" in typed(listing, state, file).stdout
        device.link.stop()
    finally:
        for one in reversed(started):
            one.end(signal.SIGKILL)


@pytest.mark.deadline
def test_a_backend_needs_to_read_the_registry_alone(
    exported: Exported, tmp_path: Path, postgresql: PostgreSql
) -> None:
    state, name = tmp_path / "server", postgresql.new_database()
    secret = tmp_path / "reader.password"
    secret.write_text(f"{PASSWORD}\n")
    postgresql.do(f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'")
    writes = ["--registry", postgresql.url_without_password(name)]
    writes += ["--registry-password-file", str(postgresql.password_file)]
    reads = ["--registry", writes[1].replace("://splitedge@", "://reader@")]
    reads += ["--registry-password-file", str(secret)]
    mqtt = ["--mqtt", "mosquitto:127.0.0.1:0"]
    started = [ServerRun(state, [*FREE, *mqtt, *writes], tmp_path / "a", role="api")]
    try:
        api = started[0].wait_ready()
        exported.install(state / "models")
        engine = open_engine(postgresql.url(name))
        with engine.begin() as connection:
            connection.execute(sql("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader"))
        engine.dispose()
        started.append(ServerRun(state, [*FREE, *reads], tmp_path / "b", role="backend"))
        backend = started[1].wait_ready()
        wait_until(lambda: is_ready(backend), lambda: backend.stderr, 30)
        device = Roles(state, api, [], "").device("pi")
        reply = device.ask(exported.query(0, exported.x[:1], id="read"))
        assert "logits" in reply.tensors
        device.link.stop()
    finally:
        for one in reversed(started):
            one.end(signal.SIGKILL)
