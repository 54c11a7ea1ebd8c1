"""A real server under far more queries than it can answer, over HTTP and MQTT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
import pytest
import urllib3

from benchmarks.load.clients import (
    ANSWERED,
    NO_REPLY,
    NOT_SENT,
    OVERLOADED,
    LoadProcess,
)
from benchmarks.load.fairness import Site
from benchmarks.load.overload import overload
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

QUEUE: Final = 8
QUERIES: Final = 300
DEADLINE_MS: Final = 3000.0


def test_a_burst_is_refused_in_words_and_each_query_has_one_outcome(tmp_path: Path) -> None:
    """FAULTS row 8: 300 queries at one moment for a queue of eight; the server goes on as before.

    A query has one outcome. Over MQTT an expired one gets no reply: its device has answered.
    """
    site = Site(tmp_path, "cnn6", 48, 1, ("--queue", str(QUEUE)))
    try:
        bursts = [burst(site, transport) for transport in site.urls]
        wait_until(
            lambda: outcomes(counts(site, tmp_path)) == 2 * QUERIES, "an outcome of each query"
        )
        sender = counts(site, tmp_path)
        assert sender["requests"] == 2 * QUERIES
        assert sender["answered"] == sum(found[ANSWERED] for found in bursts)
        assert sender["refused"] == sum(found[OVERLOADED] for found in bursts)
        assert (sender["limited"], sender["failed"]) == (0, 0)
        sent = QUERIES - burst(site, "MQTT", backs_off=True)[NOT_SENT]
        # what the device answered at once never came here
        wait_until(
            lambda: outcomes(counts(site, tmp_path)) == 2 * QUERIES + sent,
            "an outcome of each query that was sent",
        )
        for transport in site.urls:
            assert calm(site, transport) == {ANSWERED}
    finally:
        site.server.stop()


def burst(site: Site, transport: str, *, backs_off: bool = False) -> Counter[str]:
    """The outcomes of a burst; what holds on any machine is checked."""
    more = {"rows": 8, "rate": 100.0 * QUERIES, "seconds": 0.01, "warm_s": 0.0}
    more["backs_off"] = backs_off
    load = site.load(transport, 0, deadline_ms=DEADLINE_MS, patience_s=8.0, **more)
    process = LoadProcess(load)
    before = memory_mb(site)
    process.go()
    tally = process.tally()
    assert memory_mb(site) - before < 100
    assert sum(tally.outcomes.values()) == QUERIES
    assert tally.outcomes.keys() <= {ANSWERED, OVERLOADED, NO_REPLY, NOT_SENT, "expired"}
    assert tally.outcomes[ANSWERED] > 0
    assert tally.outcomes[OVERLOADED] > 0
    assert tally.with_retry == tally.outcomes[OVERLOADED]
    return tally.outcomes


def counts(site: Site, work: Path) -> dict[str, int]:
    """The server's counts of the device's queries."""
    secret = (work / "server" / "keys" / "operator.key").read_text().strip()
    login = {"Authorization": f"Bearer operator:{secret}"}
    load = urllib3.request("GET", f"{site.server.http}/api/v1/load", headers=login).json()
    found: dict[str, int] = load["senders"]["device-0"]
    return found


def outcomes(found: dict[str, int]) -> int:
    """The number of queries that have their outcome; a probe has none."""
    return sum(found[name] for name in ("answered", "limited", "refused", "expired", "failed"))


def calm(site: Site, transport: str) -> set[str]:
    """Outcomes of queries that come one after another."""
    process = LoadProcess(site.load(transport, 0, seconds=0.5, warm_s=0.0))
    process.go()
    return set(process.tally().outcomes)


def memory_mb(site: Site) -> float:
    """Resident memory of the server's process."""
    rss: int = psutil.Process(site.server.pid).memory_info().rss
    return rss / 1e6


@pytest.mark.fault_figures
def test_goodput_at_five_times_the_peak(tmp_path: Path, reached: Callable[..., None]) -> None:
    """FAULTS row 8: an open loop at 1, 2 and 5 times the peak, with a deadline of 1 s."""
    _, cases = overload(tmp_path, "resnet18", 64, 1000.0, 3)
    goodput = {
        way: min(case.goodput for case in cases if case.times > 1 and case.transport == way)
        for way in {case.transport: None for case in cases}
    }
    worst = min(goodput.values())
    shares = ", ".join(f"{100 * share:.0f} % ({way})" for way, share in goodput.items())
    slowest_ms = max(case.p99_ms for case in cases)
    grown_mb = max(case.grown_mb for case in cases)
    reached(
        "overload",
        f"goodput {shares} of the peak, p99 of answers {slowest_ms:.0f} ms at a deadline"
        f" of 1,000 ms, memory {grown_mb:+.0f} MB",
        goodput=worst,
        p99_ms=slowest_ms,
        grown_mb=grown_mb,
    )
    assert all(case.with_retry == 1.0 for case in cases)
    assert worst >= 0.9
    assert slowest_ms <= 1000
    assert grown_mb < 100
