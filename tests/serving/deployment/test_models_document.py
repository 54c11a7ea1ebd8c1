"""What docs/models.md says to type, typed: only ports and the token are put in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import urllib3

from tests.reader import Document, Reader, started_server
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

PAGE = Document("docs/models.md")


@pytest.fixture(scope="module")
def reader(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """The page's server with digits/1 to 3 and letters/1, and the device that enrolled there."""
    folder = tmp_path_factory.mktemp("models-page")
    for version in (1, 2, 3):
        exported.install(folder / "server" / "models", version=version)
    with started_server(folder, PAGE.snippet("server") + PAGE.snippet("token")) as reader:
        exported.install(folder / "server" / "models", name="letters")
        wait_until(lambda: "letters" in {one["model"] for one in models(reader)}, "letters", 20)
        assert "digits/3" in reader.shell(PAGE.snippet("device"))
        yield reader


def models(reader: Reader) -> list[dict[str, Any]]:
    key = (reader.folder / "server" / "keys" / "operator.key").read_text().strip()
    headers = {"Authorization": f"Bearer operator:{key}"}
    answer = urllib3.request("GET", f"{reader.http}/api/v1/models", headers=headers).json()
    found: list[dict[str, Any]] = answer["models"]
    return found


def test_the_page_in_the_order_of_a_reader(reader: Reader) -> None:
    listed = reader.shell(PAGE.snippet("list"))
    for version in ("digits/1", "digits/2", "digits/3", "letters/1"):
        assert version in listed
    follows, pinned, default = reader.shell(PAGE.snippet("assign")).splitlines()
    assert follows == "fleet kitchen follows letters, which is at letters/1"
    assert pinned == "fleet kitchen is pinned to digits/1"
    assert default.endswith("it follows digits, which is at digits/3")
    back = reader.shell(PAGE.snippet("rollback"))
    assert back == "digits/2 is active; fleets that follow it: kitchen\n"
    assert reader.shell(PAGE.snippet("activate")) == back
    assert "kitchen" in reader.shell(PAGE.snippet("devices"))
    tagged, *shown, untagged = reader.shell(PAGE.snippet("tags")).splitlines()
    assert tagged == "pi-4 has the tags canary, outdoors"
    assert any("canary outdoors" in line for line in shown)
    assert untagged == "pi-4 has the tags canary"
    assert reader.shell(PAGE.snippet("remove")) == "removed digits/1\n"
    assert not (reader.folder / "server" / "models" / "digits" / "1").exists()
    answers = reader.shell(PAGE.snippet("api")).replace("}{", "}\n{").splitlines()
    overview, pinned_to, follows_again, activated, rolled, removed = map(json.loads, answers)
    assert [one["version"] for one in overview["models"]] == [2, 3, 1]
    assert (pinned_to["version"], pinned_to["pinned"]) == (2, True)
    assert (follows_again["model"], follows_again["pinned"]) == ("digits", False)
    assert activated == {"active": "digits/3", "left": None}
    assert rolled == {"active": "digits/2", "left": "digits/3"}
    assert removed == {"removed": ["letters/1"]}
