"""What docs/devices.md says to type, typed: only ports are put in, and fewer devices enrol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest

from edge_sdk import EdgeAgent, api
from edge_sdk.errors import EnrolmentError
from edge_sdk.identity import Identity
from tests.reader import WRITTEN_HTTP, Document, Reader, started_server
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

PAGE = Document("docs/devices.md")
TOKEN = "splitedge server token create --state server"
X = np.zeros((1, 8, 8), np.float32)


@pytest.fixture(scope="module")
def reader(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """The page's server, with a model."""
    folder = tmp_path_factory.mktemp("devices-page")
    (folder / "server").mkdir()
    (folder / "server" / "models").symlink_to(models)
    with started_server(folder, PAGE.snippet("server") + TOKEN) as reader:
        yield reader


def test_many_devices_are_enrolled_from_a_script(reader: Reader) -> None:
    few = PAGE.snippet("tokens").replace("--count 200", "--count 12")
    assert reader.shell(few) == "tokens.txt: 12 tokens, one a line; a device takes one\n"
    assert reader.shell(PAGE.snippet("one")) == (
        "enrolled as cam-000 in fleet yard: its agent fetches the bundle when it starts\n"
    )
    (reader.folder / "many.py").write_text(PAGE.snippet("many").replace(WRITTEN_HTTP, reader.http))
    reader.shell("python many.py")
    names = [f"cam-{number:03}" for number in range(12)]
    assert listed(reader, "yard") == names
    assert [Identity.load(reader.folder / "devices" / name).device for name in names] == names

    assert reader.shell(PAGE.snippet("rename")) == "cam-000 has the title Kitchen camera\n"

    # one comes back with an empty disk, while the old one still runs
    with EdgeAgent.open(reader.folder / "devices" / "cam-000") as agent:
        wait_until(
            lambda: agent.predict(X, threshold=-1.0, deadline_s=2).source == "server",
            agent.status,
            30,
        )
        token = reader.shell(PAGE.snippet("back")).strip()
        again = api.enroll(reader.http, token, reader.folder / "new-disk", name="another")
        assert (again.device, again.fleet) == ("cam-000", "yard")
        wait_until(lambda: "was replaced" in agent.status().why_away, agent.status, 10)
    with pytest.raises(EnrolmentError, match="wrong credential"):
        api.is_approved(Identity.load(reader.folder / "devices" / "cam-000"))
    assert api.is_approved(again)
    assert listed(reader, "yard") == names
    assert titles(reader)["cam-000"] == "Kitchen camera"

    assert reader.shell(PAGE.snippet("remove")) == "removed cam-000, cam-001\n"
    assert listed(reader, "yard") == names[2:]
    wait_until(lambda: refused(again), "a removed device is let in", 10)


def listed(reader: Reader, fleet: str) -> list[str]:
    """The names of a fleet's devices."""
    rows = orjson.loads(reader.shell("splitedge server devices --state server --json"))
    return [row["device"] for row in rows if row["fleet"] == fleet]


def titles(reader: Reader) -> dict[str, str | None]:
    """The title of each device, by name."""
    rows = orjson.loads(reader.shell("splitedge server devices --state server --json"))
    return {row["device"]: row["title"] for row in rows}


def refused(identity: Identity) -> bool:
    """Whether the server refuses a device."""
    try:
        api.is_approved(identity)
    except EnrolmentError:
        return True
    return False
