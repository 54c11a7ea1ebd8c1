"""docs/dashboard.md: its command is typed, and the link that it prints signs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.dashboard.links import URL_NAME
from server.registry.database import Registry
from tests.reader import Document, Reader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.commands import Splitedge

PAGE = Document("docs/dashboard.md")


def test_the_command_prints_a_link(tmp_path: Path, splitedge: Splitedge) -> None:
    state = tmp_path / "server"
    state.mkdir()
    registry = Registry.open(f"sqlite:///{state}/registry.db")
    (state / URL_NAME).write_text("http://127.0.0.1:8000/")
    link = Reader(tmp_path).shell(PAGE.snippet("link")).strip()
    assert link.startswith("http://127.0.0.1:8000/#/sign-in/")
    command = "server", "dashboard-link", "--state", str(state), "--json"
    named = splitedge(*command, "--name", "anna", "--url", "https://edge.example").json["link"]
    assert named.startswith("https://edge.example/#/sign-in/")
    reads = splitedge(*command, "--name", "anna", "--read-only").json["link"]
    for one, who in ((link, "operator"), (named, "operator:anna"), (reads, "reader:anna")):
        assert registry.sign_ins.redeem(one.rpartition("/")[2])[0].who == who
    assert splitedge(*command, "--sign-out", "--expires", "1h").json["expires_in_s"] == 3600
    assert registry.trail.entries(1)[0].detail == "all, 3 sessions"
    registry.close()


def test_a_server_without_pages_has_no_link(tmp_path: Path, splitedge: Splitedge) -> None:
    Registry.open(f"sqlite:///{tmp_path}/registry.db").close()
    assert "--url" in splitedge("server", "dashboard-link", "--state", str(tmp_path)).refusal
