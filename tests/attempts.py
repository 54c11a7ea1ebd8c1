"""The second attempt of a test that carries the marker `deadline` begins as the first one did.

It gets fixtures of its own: those of its module are ended and made anew, or it would find what the
first attempt left there. And it gets a time limit of its own: pytest-timeout ends its limit at the
first failure, so that a second attempt, or the end of a fixture, could wait for ever.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import pytest

LIMIT: Final = pytest.StashKey[Any]()
FAILED: Final = pytest.StashKey[bool]()


class Attempts:
    """A plugin that goes with pytest-rerunfailures, whose attempts it counts by."""

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """Remember the limit; pytest-timeout sets it, since this returns None."""
        item.stash[LIMIT] = settings

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Give a second attempt its time."""
        item.stash[FAILED] = False
        if attempt_of(item) > 1:
            _limit(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note that an attempt failed."""
        report = yield
        item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """End the fixtures of the module too, where the test will be run again."""
        if not item.stash[FAILED]:
            return
        _limit(item)
        if attempt_of(item) == 1 and item.get_closest_marker("flaky"):
            elsewhere = (other for other in item.session.items if other.path != item.path)
            # pytest has no other way to end them before the last test of the module
            item.session._setupstate.teardown_exact(next(elsewhere, None))


def attempt_of(item: pytest.Item) -> int:
    """1, or 2 where a test is run again."""
    return int(getattr(item, "execution_count", 1))


def _limit(item: pytest.Item) -> None:
    settings = item.stash.get(LIMIT, None)
    if settings is not None:  # None without pytest-timeout
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
