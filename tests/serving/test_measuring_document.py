"""`docs/measuring.md`, typed by a reader: the table of a bundle, and a pin."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest

from edge_sdk import api
from edge_sdk.bundles.update import update
from profiles import load_reference
from server.bench.models import export_random
from server.processes import ServerProcess
from server.tokens import create_token
from tests.reader import Document, Reader

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

DOCUMENT = Document("docs/measuring.md")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A folder with the state of a running server, and of its device pi-1."""
    folder = tmp_path_factory.mktemp("measuring")
    export_random("tiny", (1, 8, 8), (1, 2), folder / "server" / "models")
    server = ServerProcess(folder / "server")
    server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    token = create_token(folder / "server")
    profile = load_reference("raspberry-pi-4")
    api.enroll(server.http, token, folder / "pi", profile=profile, name="pi-1")
    assert update(folder / "pi").status == "installed"
    yield Reader(folder)
    server.stop()


def test_a_device_shows_what_its_bundle_takes(reader: Reader) -> None:
    table, _, text = reader.shell(DOCUMENT.snippet("profile")).partition("{")
    assert "bench-tiny/1/d2 (active)" in table
    assert orjson.loads("{" + text)["active"]["graphs"]["exit"]["latency_ms"] > 0


def test_a_pin_is_shown_and_followed_and_taken_back(reader: Reader) -> None:
    pin, unpin = DOCUMENT.snippet("pin").splitlines()
    assert reader.shell(pin) == "pi-1 is pinned to depth 1\n"
    (listed,) = orjson.loads(reader.shell("splitedge server devices --json --state server"))
    assert listed["pinned"] == "depth 1"
    assert "pinned" in reader.shell("splitedge server devices --state server")
    assert update(reader.folder / "pi").bundle == "bench-tiny/1/d1"
    assert reader.shell(unpin) == "pi-1 is no longer pinned\n"
    assert update(reader.folder / "pi").bundle == "bench-tiny/1/d2"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("pin pi-1", "--depth or --bundle"),
        ("pin pi-1 --depth 1 --bundle bench-tiny/1/d1", "only one of them"),
        ("pin pi-1 --depth 7", "there are bench-tiny/1/d1, bench-tiny/1/d2"),
        ("pin pi-9 --depth 1", "not enrolled"),
        ("unpin pi-9", "not enrolled"),
    ],
)
def test_a_pin_that_cannot_be_is_refused(reader: Reader, command: str, says: str) -> None:
    script = f"splitedge server {command} --state server 2>&1 && exit 1 || exit 0"
    said = reader.shell(script)
    assert said.startswith("error: ")
    assert says in said
