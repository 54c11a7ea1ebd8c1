"""Whether this machine's clock is right enough to sign by.

What is signed carries an end date. A signature made in 1970 is over before a device sees it, and
one made ten years too late is good for ten years too long: whoever kept a copy could hold updates
back with it. So nothing is signed by a clock that is plainly wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from edge_sdk.installation import BUILD_DATE, CLOCK_TRUSTED_FOR

Clock = Callable[[], datetime]

# A server that is switched off for longer is rarer than a clock that jumped.
AWAY_AT_MOST: Final = timedelta(days=366)


def utc_now() -> datetime:
    """The time by this machine's clock."""
    return datetime.now(UTC)


def clock_problem(now: datetime, last_signed: datetime | None) -> str | None:
    """The reason why nothing is to be signed at `now`, for people; None where the clock is right.

    Args:
        last_signed: when the newest timestamp was signed; None for a new repository.
    """
    if now < BUILD_DATE:
        return (
            f"the clock of the server says {now:%Y-%m-%d}, which is before its release was built"
            f" ({BUILD_DATE:%Y-%m-%d}): nothing is signed, and no device can enrol, until the clock"
            " is right; set it (NTP, or `date`), and no restart is needed"
        )
    if last_signed is None:
        since, latest = "its release was built", BUILD_DATE + CLOCK_TRUSTED_FOR
    else:
        since = "it last signed"
        latest = max(last_signed, BUILD_DATE) + AWAY_AT_MOST
    if now <= latest:
        return None
    return (
        f"the clock of the server says {now:%Y-%m-%d}, which is too long after {since}: nothing is"
        " signed, and no device can enrol, until the clock is right; set it, or if it is right run"
        " `splitedge server root trust-clock`"
    )
