"""The commits that reports name: in the history, or listed in benchmarks/results/README.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMMIT = r"[0-9a-f]{9}"
NAMED = re.compile(rf'commit"?:? "?((?:{COMMIT}(?:-dirty)?(?:, | and )?)+)')
HEADING = "## Commits that are not in the history"


def named() -> set[str]:
    """The commits that the reports say they were made at."""
    texts = [path.read_text() for path in RESULTS.rglob("*.*") if path.suffix in {".json", ".md"}]
    found = [group for text in texts for group in NAMED.findall(text)]
    return {commit for group in found for commit in re.findall(COMMIT, group)}


def listed() -> set[str]:
    """The commits of the README's list."""
    _, _, section = (RESULTS / "README.md").read_text().partition(HEADING)
    return set(re.findall(rf"`({COMMIT})`", section.partition("\n## ")[0]))


def in_history(commit: str) -> bool:
    """Whether a commit is an ancestor of the one that is checked out."""
    ask = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(ask, check=False, capture_output=True).returncode == 0


def test_a_report_names_a_commit_of_the_history_or_the_readme_says_that_it_does_not() -> None:
    reported = named()
    assert len(reported) > 10
    # a copy of the files without its history, or with a part of it, has nothing to look up
    ask = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    whole = subprocess.run(ask, check=False, capture_output=True, text=True).stdout.strip()
    if whole == "false":
        assert {commit for commit in reported if not in_history(commit)} <= listed()
