"""Tags of devices: on each kind of database, by command and over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.errors import BadRequestError, UnknownDeviceError
from server.registry.database import Registry, open_registry
from server.registry.selection.tags import MAX_TAGS


def test_tags_stay_with_their_device(registry_url: str) -> None:
    registry = Registry.open(registry_url)
    for name in ("pi-1", "pi-2"):
        registry.redeem_token(registry.create_token(), name, {})
    assert registry.device("pi-1").tags == ()
    assert registry.tags.add("pi-1", ["outdoors", "canary"]) == ("canary", "outdoors")
    assert registry.tags.add("pi-1", ["canary"]) == ("canary", "outdoors")
    assert registry.tags.add("pi-2", ["canary"]) == ("canary",)
    assert registry.tags.all() == {"canary": ("pi-1", "pi-2"), "outdoors": ("pi-1",)}
    assert registry.tags.remove("pi-1", ["outdoors", "never-had"]) == ("canary",)
    assert [one.tags for one in registry.devices()] == [("canary",), ("canary",)]
    registry.revoke("pi-2")
    assert registry.tags.all() == {"canary": ("pi-1",)}
    with pytest.raises(BadRequestError, match="tag: expected 1 to 63 of a-z"):
        registry.tags.add("pi-1", ["Two Words"])
    with pytest.raises(BadRequestError, match=f"at most {MAX_TAGS} tags, got {MAX_TAGS + 2}"):
        registry.tags.add("pi-1", [f"t-{number}" for number in range(MAX_TAGS + 1)])
    with pytest.raises(UnknownDeviceError, match="pi-9"):
        registry.tags.add("pi-9", ["canary"])
    # what changes nothing leaves no trace
    entries = [one for one in registry.trail.entries(about="pi-1") if one.what == "device.tag"]
    assert [one.detail for one in reversed(entries)] == [
        "pi-1 tags=canary,outdoors",
        "pi-1 tags=canary",
    ]
    registry.close()


def test_the_commands_tag_and_list(tmp_path: Path) -> None:
    state = tmp_path / "server"
    state.mkdir()
    registry = Registry.open(f"sqlite:///{state}/registry.db")
    for name in ("pi-1", "pi-2"):
        registry.redeem_token(registry.create_token(), name, {})
    registry.close()

    def devices(*words: str) -> str:
        done = CliRunner().invoke(app, ["devices", *words, "--state", str(state)])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert devices("tag", "pi-1", "canary", "outdoors") == ("pi-1 has the tags canary, outdoors\n")
    assert json.loads(devices("untag", "pi-1", "outdoors", "--json")) == {
        "device": "pi-1",
        "tags": ["canary"],
    }
    (row,) = json.loads(devices("--tag", "canary", "--json"))
    assert (row["device"], row["tags"]) == ("pi-1", ["canary"])
    assert "no device has the tag attic" in devices("--tag", "attic")
    assert open_registry(state).device("pi-2").tags == ()
