"""Times and counts as people read them."""

from __future__ import annotations

import time

import pytest

from edge_sdk.cli.times import ago, plural

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("passed_s", "text"),
    [
        (0.4, "now"),
        (1, "1 second ago"),
        (59.9, "59 seconds ago"),
        (60, "1 minute ago"),
        (3_599, "59 minutes ago"),
        (7_200, "2 hours ago"),
        (86_400, "1 day ago"),
        (10 * 86_400, "10 days ago"),
        (-5, "now"),  # two clocks differ by some seconds
    ],
)
def test_a_time_is_told_in_its_largest_unit(passed_s: float, text: str) -> None:
    assert ago(NOW - passed_s, NOW) == text


def test_a_time_ahead_of_the_clock_is_told_as_it_is() -> None:
    ahead = NOW + 7_200
    assert ago(ahead, NOW) == time.strftime("%Y-%m-%d %H:%M", time.localtime(ahead))


def test_no_time_is_nothing() -> None:
    assert ago(None, NOW) == ""
    assert ago(time.time() - 61) == "1 minute ago"


def test_a_count_has_its_noun() -> None:
    assert [plural(n, "device") for n in (0, 1, 2)] == ["0 devices", "1 device", "2 devices"]
