"""The benchmark of idle memory: every extra has a process that shows what it costs."""

from __future__ import annotations

import pytest

from benchmarks.install.footprint import EXTRAS, cases, pyproject_extras


def test_each_extra_of_the_project_is_measured_or_has_no_process() -> None:
    asked = cases(pyproject_extras())
    names = [each.name for each in asked]
    assert names[0] == "agent"
    assert len(names) == len({*names})
    assert {*EXTRAS["serve"], *EXTRAS["server"]} <= {*asked}


def test_an_extra_that_nothing_is_known_of_is_named() -> None:
    with pytest.raises(ValueError, match="memory: quantum; add them to EXTRAS"):
        cases(["serve", "quantum"])
