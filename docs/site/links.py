"""Links of the documents to files outside docs/, which the site holds copies of.

A document links to what a reader of the repository has: reports, examples, the README. The site
puts such files under `repository/`, and links there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = "docs"
COPIES: Final = "repository"
# [text](target), [text](target#anchor), ![text](target); no URL, no anchor alone
_LINK: Final = re.compile(r"(!?\[[^\]]*\])\(([^)\s#:]+)(#[\w-]+)?\)")
_SHOWN: Final = {".md", ".png", ".svg", ".json", ".toml", ".py", ".service", ".yaml", ".yml"}


def outside() -> list[str]:
    """Files outside docs/ that documents, or such files, link to: paths from the root."""
    found: dict[str, None] = {}
    waiting = [str(path.relative_to(ROOT)) for path in sorted((ROOT / DOCS).rglob("*.md"))]
    while waiting:
        source = waiting.pop()
        for target in _targets(source, (ROOT / source).read_text()):
            if _has_copy(target) and target not in found:
                found[target] = None
                if target.endswith(".md"):
                    waiting.append(target)
    return sorted(found)


def site_place(source: str) -> str:
    """Place of a file of the repository among the site's sources."""
    inside = PurePosixPath(source).parts[0] == DOCS
    return source.removeprefix(f"{DOCS}/") if inside else f"{COPIES}/{source}"


def source_of(place: str) -> str:
    """The file of the repository that stands at that place among the site's sources."""
    copied = place.startswith(f"{COPIES}/")
    return place.removeprefix(f"{COPIES}/") if copied else f"{DOCS}/{place}"


def with_links_of_site(text: str, source: str) -> str:
    """A document whose links lead to where their files are on the site.

    A link to what the site does not have, as a folder or code, becomes its text.

    Args:
        source: the document's path from the root of the repository.
    """
    folder = str(PurePosixPath(site_place(source)).parent)

    def placed(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if not (_inside(target) and (ROOT / target).is_file()) and not _has_copy(target):
            return link[1].strip("[]")
        return f"{link[1]}({relpath(site_place(target), folder)}{link[3] or ''})"

    return _LINK.sub(placed, text)


def _targets(source: str, text: str) -> Iterator[str]:
    for _, target, _ in _LINK.findall(text):
        yield _target(source, target)


def _target(source: str, link: str) -> str:
    """What a link of a document leads to: a path from the root."""
    return normpath(PurePosixPath(source).parent / link)


def _inside(target: str) -> bool:
    return target.startswith(f"{DOCS}/")


def _has_copy(target: str) -> bool:
    path = ROOT / target
    return not _inside(target) and path.suffix in _SHOWN and path.is_file()
