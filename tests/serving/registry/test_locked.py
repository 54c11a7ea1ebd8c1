"""A database that another program holds: inference goes on, and who writes is told to come back."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
import urllib3

from profiles import load_reference
from server.registry.database import open_registry

if TYPE_CHECKING:
    from tests.serving.conftest import Exported, ServerRun

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

# not loopback alone, so that a query is let in by the registry
OPEN = ("--http", "0.0.0.0:0", "--mqtt", "embedded:127.0.0.1:0", "--insecure")
ENROLMENTS = 60


@contextmanager
def write_lock(file: Path) -> Iterator[None]:
    """The lock of a SQLite database, as a program holds it that does not let go."""
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
    finally:
        connection.close()


def test_inference_does_not_wait_for_a_database_that_others_hold(
    run_server: Callable[..., ServerRun], exported: Exported, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    exported.install(state / "models")
    server = run_server(state, OPEN).wait_ready()
    url = f"http://127.0.0.1:{server.http.rsplit(':', 1)[1]}"
    profile = load_reference("raspberry-pi-4").to_dict()
    registry = open_registry(state)
    _, credential = registry.redeem_token(registry.create_token(), "pi-1", profile)
    # right ones: another token is refused without a write
    tokens = [registry.create_token() for _ in range(ENROLMENTS)]
    registry.close()
    http = urllib3.PoolManager(maxsize=ENROLMENTS + 1, retries=False, timeout=40)
    query = {
        "name": "x",
        "shape": [1, 1, 8, 8],
        "datatype": "UINT8",
        "data": exported.x[0].ravel().tolist(),
    }

    def infer(path: str = "/v2/models/digits/infer") -> tuple[int, float]:
        began = time.monotonic()
        login = {"Authorization": f"Bearer pi-1:{credential}"}
        body = orjson.dumps({"inputs": [query]})
        status = http.request("POST", f"{url}{path}", headers=login, body=body).status
        return status, time.monotonic() - began

    def enrol(number: int) -> tuple[int, str | None, float]:
        began = time.monotonic()
        body = {"token": tokens[number], "profile": profile}
        answer = http.request("POST", f"{url}/api/v1/enroll", json=body)
        return answer.status, answer.headers.get("Retry-After"), time.monotonic() - began

    assert infer()[0] == 200
    with ThreadPoolExecutor(ENROLMENTS) as pool:
        with write_lock(state / "registry.db"):
            waiting = [pool.submit(enrol, number) for number in range(ENROLMENTS)]
            time.sleep(0.5)  # they are under way
            asked = [infer() for _ in range(10)]
            answers = [one.result() for one in waiting]
        worst = max(seconds for _, seconds in asked)
        print(
            f"inference: worst {worst:.3f} s, median"
            f" {statistics.median(seconds for _, seconds in asked):.3f} s; enrolments: worst"
            f" {max(seconds for *_, seconds in answers):.1f} s,"
            f" {sorted({(status, after) for status, after, _ in answers}, key=str)}"
        )
    assert {status for status, _ in asked} == {200}
    assert worst < 0.5
    # each was told to come back, within bounds
    assert {(status, after) for status, after, _ in answers} == {(503, "1")}
    assert max(seconds for *_, seconds in answers) < 15
    assert enrol(0)[0] == 201  # the database is free, and the token was not used up
    # the failure is said once, not sixty times (and once by a duty of housekeeping), and its end
    assert 1 <= server.stderr.count("another program holds the database") <= 3
    assert "writing works again" in server.stderr
