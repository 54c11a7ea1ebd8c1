"""`splitedge agent enroll`, `status`, `update` and `profile`, against a real server."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_sdk.agent import EdgeAgent
from server.tokens import create_token
from tests.commands import Splitedge
from tests.edge.agent_commands.samples import SAMPLES
from tests.waiting import wait_until

PROFILE = ("--profile", "raspberry-pi-4")  # measuring takes seconds


def test_enrolling_measures_the_device_and_fetches_its_bundle(
    enrolment: tuple[Path, dict[str, Any], str], server: tuple[str, Path], splitedge: Splitedge
) -> None:
    pi, output, _ = enrolment
    assert output == {"device": "pi-1", "fleet": "default", "bundle": "bench-tiny/1/d2"}
    status = splitedge("agent", "status", "--state", pi, "--json").json
    assert (status["device"], status["server"], status["depth"]) == ("pi-1", server[0], 2)
    assert status["server_answers"] is True
    (listed,) = splitedge("server", "devices", "--state", server[1], "--json").json
    assert (listed["device"], listed["bundle"]) == ("pi-1", "bench-tiny/1/d2")


def test_unknown_and_used_tokens_are_refused(
    enrolment: tuple[Path, dict[str, Any], str],
    server: tuple[str, Path],
    tmp_path: Path,
    splitedge: Splitedge,
) -> None:
    enroll = ("agent", "enroll", "--server", server[0], "--state", tmp_path / "pi", *PROFILE)
    for token in ("nonsense", enrolment[2]):
        assert "token" in splitedge(*enroll, "--token", token).refusal
    assert not (tmp_path / "pi").exists()


def test_token_of_another_fleet_is_refused_and_leaves_nothing(
    server: tuple[str, Path], tmp_path: Path, splitedge: Splitedge
) -> None:
    token, _, root = create_token(server[1]).partition(".")
    other = f"{token}.{root[::-1]}"
    enroll = ("agent", "enroll", "--server", server[0], "--state", tmp_path / "pi", *PROFILE)
    assert "root key" in splitedge(*enroll, "--token", other).refusal
    assert not (tmp_path / "pi" / "agent.json").exists()


def test_server_that_is_not_there_is_told(
    free_port: int, tmp_path: Path, splitedge: Splitedge
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    enroll = ("agent", "enroll", "--token", "t", "--state", tmp_path / "pi", *PROFILE)
    refusal = splitedge(*enroll, "--server", url).refusal
    assert url in refusal
    assert "is the server running?" in refusal
    assert not (tmp_path / "pi").exists()


def test_address_without_a_scheme_is_refused_before_the_token_is_spent(
    server: tuple[str, Path], tmp_path: Path, splitedge: Splitedge
) -> None:
    http, state = server
    token = create_token(state)
    enroll = ("agent", "enroll", "--token", token, "--state", tmp_path / "pi", *PROFILE, "--json")
    for wrong in (http.removeprefix("http://"), "pi-server", http.replace("http", "ftp")):
        refusal = splitedge(*enroll, "--server", wrong).refusal
        assert "expected http(s)://HOST[:PORT]" in refusal
    assert splitedge(*enroll, "--server", http).json["bundle"] == "bench-tiny/1/d2"


def test_status_tells_the_server_from_its_broker(
    pi: Path, server: tuple[str, Path], free_port: int, tmp_path: Path, splitedge: Splitedge
) -> None:
    def status() -> dict[str, Any]:
        fields: dict[str, Any] = splitedge("agent", "status", "--state", copy, "--json").json
        return fields

    copy = tmp_path / "pi"
    shutil.copytree(pi, copy, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
    well = status()
    assert (well["server_answers"], well["broker_answers"]) == (True, True)
    table = splitedge("agent", "status", "--state", copy).out
    rows = dict(re.findall(r"│ (\S.*?) +│ (\S.*?) +│", table))
    assert (rows["server answers"], rows["agent"]) == ("yes", "does not run")

    # the API answers, and the broker does not: it is stopped for a moment
    addresses = json.loads((server[1] / "addresses.json").read_text())
    (broker,) = listening_at(int(addresses["mqtt"].rpartition(":")[2]))
    broker.suspend()
    try:
        silent = status()
    finally:
        broker.resume()
    assert (silent["server_answers"], silent["broker_answers"]) == (True, False)
    assert silent["broker_why_not"].startswith(f"no broker at {well['broker']} after 3 s")

    # the broker answers, and the API does not
    identity = json.loads((copy / "agent.json").read_text())
    elsewhere = identity | {"server": f"http://127.0.0.1:{free_port}"}
    (copy / "agent.json").write_text(json.dumps(elsewhere))
    away = status()
    assert (away["server_answers"], away["broker_answers"]) == (False, True)
    assert "is the server running?" in away["why_not"]

    # a credential that was replaced: the broker says no, and is there
    wrong = identity | {"credential": identity["credential"][::-1]}
    (copy / "agent.json").write_text(json.dumps(wrong))
    refused = status()
    assert (refused["server_answers"], refused["broker_answers"]) == (False, False)
    assert "Not authorized" in refused["broker_why_not"]


@pytest.mark.deadline
def test_asking_for_the_broker_leaves_a_running_agent_its_connection(
    pi: Path, splitedge: Splitedge
) -> None:
    with EdgeAgent.open(pi) as agent:
        wait_until(lambda: agent.predict(SAMPLES[0], threshold=-1.0).source == "server", lambda: "")
        assert splitedge("agent", "status", "--state", pi, "--json").json["broker_answers"]
        assert agent.predict(SAMPLES[0], threshold=-1.0).source == "server"
        assert agent.status().why_away == ""


def listening_at(port: int) -> list[psutil.Process]:
    """The processes that listen at a port of this machine."""
    return [
        psutil.Process(each.pid)
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.pid and each.laddr and each.laddr.port == port
    ]


def test_device_is_enrolled_once(pi: Path, server: tuple[str, Path], splitedge: Splitedge) -> None:
    before = (pi / "agent.json").read_bytes()
    enroll = ("agent", "enroll", "--server", server[0], "--token", "t", "--state", pi)
    refusal = splitedge(*enroll).refusal
    assert "enrolled there already; to go on with it, run `splitedge agent update`" in refusal
    assert (pi / "agent.json").read_bytes() == before


def test_update_fetches_what_is_assigned_and_says_it(pi: Path, splitedge: Splitedge) -> None:
    kept = (pi / "active.json").read_bytes()
    (pi / "active.json").unlink()
    output = splitedge("agent", "update", "--state", pi, "--json").json
    assert output == {"device": "pi-1", "bundle": "bench-tiny/1/d2"}
    assert (
        json.loads(kept)["slots"].items()
        <= json.loads((pi / "active.json").read_text())["slots"].items()
    )
    assert "pi-1: bench-tiny/1/d2" in splitedge("agent", "update", "--state", pi).out


def test_profile_of_the_bundle_is_a_table_of_its_graphs(pi: Path, splitedge: Splitedge) -> None:
    called = splitedge("agent", "profile", "--bundle", "--state", pi)
    assert (called.status, called.err) == (0, "")
    rows = [line.split("│") for line in called.out.splitlines() if "exit" in line]
    (cells,) = [[cell.strip() for cell in row] for row in rows]
    assert cells[1:3] == ["bench-tiny/1/d2 (active)", "exit"]
    assert float(cells[3]) > 0
    assert float(cells[4]) > 0
    taken = splitedge("agent", "profile", "--bundle", "--state", pi, "--json").json
    assert taken["active"]["bundle"] == "bench-tiny/1/d2"
    assert taken["active"]["graphs"]["exit"]["runs"] >= 5
    assert taken["others"] == []
