"""The site of the documents: it builds without a warning, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from docs.site.settings import recipe_keys
from edge_sdk import __all__ as public_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a link to a page or an anchor that is not there would have stopped it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = re.compile(
        r'(?:src|srcset)="https?://[^"]*|<link[^>]+href="https?://[^"]*|@import[^;]*'
    )
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 50
    assert not {found for page in pages for found in fetched.findall(page.read_text())}


def test_every_link_leads_to_a_file_of_the_site(site: Path) -> None:
    missing = set()
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            target = unquote(urldefrag(link).url)
            if target and not re.match(r"[a-z]+:", target) and page.name != "404.html":
                found = (page.parent / target).resolve()
                if not found.exists():
                    missing.add(f"{page.relative_to(site)}: {link}")
    assert not missing


def test_every_page_has_a_place_in_the_navigation() -> None:
    named = (ROOT / "mkdocs.yml").read_text()
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "methods").glob("*.md")]
    assert not [page.name for page in pages if f" {page.relative_to(ROOT / 'docs')}\n" not in named]


def test_the_reference_has_every_public_name_command_and_key(site: Path) -> None:
    python = (site / "reference" / "python.html").read_text()
    assert all(f'.{name}"' in python for name in public_names if not name.startswith("__"))
    recipe = (site / "reference" / "recipe.html").read_text()
    assert all(f"<code>{key.name}</code>" in recipe for key in recipe_keys())
    commands = (site / "reference" / "commands.html").read_text()
    assert "<code>splitedge server token create</code>" in commands
    assert "<code>--mqtt-password-file</code>" in commands


def test_every_key_of_a_recipe_is_described() -> None:
    keys = recipe_keys()
    assert {"", "data", "train", "round", "evaluate", "privacy", "energy", "export"} == {
        k.table for k in keys
    }
    assert not [f"[{key.table}] {key.name}" for key in keys if not key.meaning]
