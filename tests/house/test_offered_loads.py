"""The open loop of bench-peers: loads that do not wait, the lines of servers, and their knees."""

from __future__ import annotations

from fastapi import FastAPI

from benchmarks.peers.load import Order, run_open
from benchmarks.peers.offered import Point, lines_of, picture, table
from edge_sdk.service.listening import listen
from edge_sdk.wire.address import Address
from server.http_server import HttpServer


def point(server: str, offered: int, p99_ms: float, *, whole: bool = True) -> Point:
    return Point(server, offered, offered, 500 * p99_ms, 1_000 * p99_ms, whole)


def test_the_knee_is_the_last_load_whose_p99_is_not_far_above_that_of_the_lowest() -> None:
    rounds = [
        point("ours", load, p99)
        for _ in range(3)
        for load, p99 in ((100, 1.0), (200, 9.0), (400, 5.0), (800, 6.0), (1_000, 9.0))
    ]
    (line,) = lines_of(rounds)
    assert (line.loads, line.knee) == ((100, 200, 400, 800, 1_000), 400)
    assert line.p99_at(400) == 5_000
    assert "| ours | 400 | 1,000 | 5,000 | 1,000 |" in table([line])
    assert picture([line]).startswith(b"\x89PNG")


def test_a_load_counts_if_most_rounds_served_it_wholly() -> None:
    points = [
        *(point("ours", 100, 1.0) for _ in range(3)),
        *(point("ours", 200, p99, whole=p99 < 9) for p99 in (1.0, 3.0, 9.0)),
        point("ours", 400, 1.0),
        *(point("slow", 100, 9.0, whole=False) for _ in range(3)),
    ]
    (line,) = lines_of(points)
    assert (line.server, line.loads, line.p99_us) == ("ours", (100, 200), (1_000, 2_000))


def test_an_open_loop_sends_at_its_rate_and_tells_what_has_no_answer() -> None:
    app = FastAPI()
    app.add_api_route("/fast", lambda: {"ok": True}, methods=["POST"])
    with HttpServer(app, listen(Address("127.0.0.1", 0))) as server:
        port = int(server.url.rpartition(":")[2])
        tally = run_open(Order("127.0.0.1", port, "/fast", "{}", 8, 1.0), 50.0)
        # the same arrivals at each call
        assert len(tally.latencies_us) + tally.left == 42
        assert tally.answer == '{"ok":true}'
