"""`splitedge server token …`: many tokens at once, how long they live, where they go."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.registry.database import open_registry
from server.tokens import create_token
from tests.commands import Splitedge


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a server."""
    create_token(tmp_path / "server", note="first")
    return tmp_path / "server"


def test_tokens_for_a_fleet_go_into_a_file_for_their_owner(
    state: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    out = tmp_path / "new" / "tokens.txt"
    create = ("server", "token", "create", "--state", state, "--count", 200, "--fleet", "yard")
    called = splitedge(*create, "--expires", "7d", "--out", out)
    assert called.out == f"{out}: 200 tokens, one a line; a device takes one\n"
    tokens = out.read_text().splitlines()
    assert len(set(tokens)) == 200
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    listed = splitedge("server", "token", "list", "--state", state, "--json").json
    yard = [one for one in listed if one["fleet"] == "yard"]
    assert len(yard) == 200
    assert yard[0]["expires_at"] == pytest.approx(time.time() + 7 * 86_400, abs=60)
    shown = splitedge("server", "token", "list", "--state", state).out
    assert "200" in shown
    assert "first" in shown
    # nothing that is there is written over
    assert "it exists already" in splitedge(*create, "--out", out).refusal
    assert out.read_text().splitlines() == tokens


def test_tokens_are_json_for_a_script(state: Path, splitedge: Splitedge) -> None:
    create = ("server", "token", "create", "--state", state, "--json")
    many = splitedge(*create, "--count", 3, "--expires", "90m").json
    assert len(many["tokens"]) == 3
    assert (many["fleet"], many["expires_in_s"]) == ("default", 5_400)
    one = splitedge(*create).json
    assert set(one) == {"token", "fleet", "expires_in_s"}
    assert one["expires_in_s"] == 3_600


@pytest.mark.parametrize("expires", ["31d", "0s"])
def test_a_life_that_is_too_long_or_none_is_refused(
    expires: str, state: Path, splitedge: Splitedge
) -> None:
    create = ("server", "token", "create", "--state", state, "--expires", expires)
    assert "at most 2592000 seconds" in splitedge(*create).refusal


@pytest.mark.deadline
def test_a_token_stands_in_no_command_line(state: Path, tmp_path: Path) -> None:
    """`--token-file`, and `-` for standard input: an address where no server is ends the command
    after it has read the token.
    """
    enroll = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "enroll", "--server"]
    enroll += ["http://127.0.0.1:1", "--profile", "raspberry-pi-4", "--state", str(tmp_path / "pi")]

    def said(text: str | None, *words: str) -> str:
        done = subprocess.run(
            [*enroll, *words], input=text, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stderr

    file = tmp_path / "token"
    file.write_text("one.token\n")
    assert "is the server running?" in said(None, "--token-file", str(file))
    assert "is the server running?" in said("one.token\n", "--token-file", "-")
    assert "got 2; a token enrols one device" in said("one\ntwo\n", "--token-file", "-")
    assert "cannot be read" in said(None, "--token-file", str(tmp_path / "none"))
    for words in ((), ("--token", "t", "--token-file", str(file))):
        assert "--token-file FILE or --token, one of them" in " ".join(
            said(None, *words).replace("│", "").split()
        )
    assert not (tmp_path / "pi").exists()


def test_a_token_may_be_made_before_the_first_start_where_models_are(
    tmp_path: Path, splitedge: Splitedge
) -> None:
    (tmp_path / "server" / "models").mkdir(parents=True)
    create = ("server", "token", "create", "--state", tmp_path / "server")
    first, second = splitedge(*create), splitedge(*create)
    assert f"no server has run on {tmp_path / 'server'} yet" in first.err
    assert (first.status, second.status, second.err) == (0, 0, "")
    assert len(first.out.splitlines()) == len(second.out.splitlines()) == 1


def test_devices_are_removed_by_command(state: Path, splitedge: Splitedge) -> None:
    registry = open_registry(state)
    for name in ("pi-1", "pi-2", "pi-3"):
        registry.redeem_token(registry.create_token(), name, {})
    registry.close()
    remove = ("server", "devices", "remove", "--state", state)
    assert "'pi-9': not enrolled here" in splitedge(*remove, "pi-1", "pi-9").refusal
    assert splitedge(*remove, "pi-1", "pi-2").out == "removed pi-1, pi-2\n"
    rows = json.loads(splitedge("server", "devices", "--state", state, "--json").out)
    assert [row["device"] for row in rows] == ["pi-3"]
