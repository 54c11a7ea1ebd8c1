"""What docs/rollouts.md says to type, typed: only ports and the token are put in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.reader import Document, started_server
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

PAGE = Document("docs/rollouts.md")


def test_the_page_in_the_order_of_a_reader(exported: Exported, tmp_path: Path) -> None:
    exported.install(tmp_path / "server" / "models")
    with started_server(tmp_path, PAGE.snippet("server")) as reader:
        assert "digits/1" in reader.shell(PAGE.snippet("device"))
        exported.install(tmp_path / "server" / "models", version=2)
        listed = "splitedge server models list --state server"
        wait_until(lambda: "digits/2" in reader.shell(listed), "digits/2 is not published", 40)
        started, told, *_ = reader.shell(PAGE.snippet("start")).splitlines()
        assert "roll-out 1 of digits/2 (all devices) is running at 10 %" in started
        assert "roll-out 1 of digits/2 (all devices) is running at 10 %" in told
        # the server chooses the share in its next turn, which the page's second command may precede
        chosen = re.compile(r"at 10 %: 1 device in the share, \d of them on it;")
        status = "splitedge server rollout status --state server"
        wait_until(lambda: bool(chosen.search(reader.shell(status))), "no share is chosen", 40)
        paused, resumed, aborted, *rows = reader.shell(PAGE.snippet("control")).splitlines()
        assert "is paused" in paused
        assert "is running" in resumed
        assert "was aborted" in aborted
        assert any("digits/2" in row and "aborted" in row for row in rows)
        _, canary = reader.shell(PAGE.snippet("tagged")).splitlines()
        assert canary.startswith("roll-out 2 of digits/2 (tag=canary) is running at 100 %")
        answers = reader.shell(PAGE.snippet("api")).replace("}{", "}\n{").splitlines()
        every, second, third, same, paused_, again, over = map(json.loads, answers)
        assert [one["id"] for one in every["rollouts"]] == [2, 1]
        assert (second["id"], second["state"]) == (2, "aborted")
        assert (third["id"], third["shares"]) == (3, [0.5, 1.0])
        assert same["health"][0]["condition"] == "fallback<5%"
        states = [one["state"] for one in (paused_, again, over)]
        assert states == ["paused", "running", "aborted"]
