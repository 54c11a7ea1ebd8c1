"""The date of the release, by which a clock is found to be wrong, is that of the newest entry; the
torch that devices are told to install is the one that splitedge is tested with.
"""

from __future__ import annotations

import re
import tomllib
from datetime import UTC, date, datetime
from pathlib import Path

from edge_sdk.installation import BUILD_DATE, TORCH_ON_ARM

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^## (?P<version>\S+)(?: - (?P<day>\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)


def test_build_date_is_past_and_not_before_the_newest_entry_of_the_changelog() -> None:
    entries = HEADING.findall((ROOT / "CHANGELOG.md").read_text())
    released = [(version, day) for version, day in entries if version != "Unreleased"]
    assert released
    assert all(day for _, day in released), "an entry of CHANGELOG.md has no date"
    newest = date.fromisoformat(released[0][1])
    assert newest <= BUILD_DATE.date()
    assert datetime.now(UTC) >= BUILD_DATE


def test_newest_entry_of_the_changelog_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = HEADING.findall((ROOT / "CHANGELOG.md").read_text())
    versions = [version for version, _ in entries if version != "Unreleased"]
    assert versions[0] == project["version"]


def test_torch_for_arm_is_the_one_of_the_constraints_and_of_the_documents() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert f'{TORCH_ON_ARM} ; platform_machine == "aarch64"' in constraints
    for page in ("install-pi.md", "install-jetson.md"):
        assert f"{TORCH_ON_ARM} 'splitedge[train]'" in (ROOT / "docs" / page).read_text()
