"""A change is reported once, when it has lasted; a peak, noise and a slow drift within the share
are not. A value a second, 60 seconds, a quarter.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edge_sdk.monitor.lasting_change import LastingChange
from edge_sdk.monitor.monitor import ConditionsWatch, Limits
from profiles.measured import Conditions


def watched(reported: float | None = 100.0) -> LastingChange:
    watch = LastingChange(0.25, 60.0)
    watch.reported = reported
    return watch


def changes(watch: LastingChange, values: Iterable[float], start: int = 0) -> list[int]:
    """The seconds at which the watch says that the value has changed."""
    found = []
    for second, value in enumerate(values, start):
        watch.add(float(second), value)
        if watch.has_changed(float(second)):
            found.append(second)
    return found


def test_the_first_value_is_known_after_a_minute() -> None:
    watch = watched(None)
    assert changes(watch, [7.0] * 62) == [60, 61]
    assert watch.value == 7.0


def test_a_step_is_a_change_once_both_halves_of_the_minute_show_it() -> None:
    watch = watched()
    found = changes(watch, [100.0] * 100 + [126.0] * 60)
    # at 145 the older half is 86..115: 16 of its 30 values are new ones, from 100 on
    assert found[0] == 145
    assert changes(watched(), [100.0] * 100 + [125.0] * 200) == []
    assert changes(watched(), [100.0] * 100 + [74.0] * 60)[0] == 145
    assert changes(watched(), [100.0] * 100 + [75.0] * 200) == []


def test_a_peak_that_passes_is_no_change() -> None:
    assert changes(watched(), [100.0] * 100 + [1000.0] * 30 + [100.0] * 100) == []


def test_swings_around_the_value_are_no_change() -> None:
    assert changes(watched(), [50.0, 150.0] * 100) == []
    noise = np.random.default_rng(0).normal(100, 60, 2000)
    assert changes(watched(), noise.tolist()) == []


def test_rare_values_make_no_minute() -> None:
    watch = watched()
    for second in (0.0, 59.0, 118.0, 177.0):
        watch.add(second, 500.0)
        assert not watch.has_changed(second)


def test_what_is_reported_together_is_known_together() -> None:
    watch = ConditionsWatch(Limits(0.25, 60.0))
    for second in range(61):
        watch.add(second, Conditions("m/1/d2", 1000, 2.0, None, None))
    found = watch.changed(60.0)
    assert found == Conditions("m/1/d2", 1000, 2.0, None, None)
    watch.note_reported(found)
    assert watch.changed(60.0) is None
    for second in range(61, 150):  # memory falls, latency stays
        watch.add(second, Conditions("m/1/d2", 500, 2.1, 9.0, None))
    assert watch.changed(149.0) == Conditions("m/1/d2", 500, 2.1, 9.0, None)


def test_another_bundle_has_another_latency() -> None:
    watch = ConditionsWatch(Limits(0.25, 60.0))
    for second in range(61):
        watch.add(second, Conditions("m/1/d2", 1000, 2.0))
    found = watch.changed(60.0)
    assert found is not None
    watch.note_reported(found)
    for second in range(61, 180):
        watch.add(second, Conditions("m/1/d1", 1000, 0.5))
        if (changed := watch.changed(second)) is not None:
            assert (second, changed) == (121, Conditions("m/1/d1", 1000, 0.5))
            break
    else:
        raise AssertionError("the new bundle's latency was never reported")
