"""What a disk may hold after a power cut, without one: states that POSIX allows, from a record.

A child does its work and records the tree of its folder before each file operation and at each
fsync. A crash may then lose or keep, each by itself, every name that was made, moved or removed
since its folder was synced, and leave of a file's bytes since its own sync nothing, some, zeros or
all. No order among unsynced operations is assumed, which is harsher than any file system we know.
"""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Does WHAT, a list, in STATE and prints the record: a line of all bytes that files had, then a line
# for each (kind, path, tree). A tree has for each path its inode and the number of its bytes, None
# for a folder. Kinds: `step` before an operation, `sync` after fsync of `path`, `done` after one
# WHAT, with its name for the path.
RECORDER: Final = """
import os, sys
from pathlib import Path

state, work = Path(sys.argv[1]), sys.argv[2:]
contents = {}
TOUCHES = {"open", "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.truncate"}
real_fsync, recording, record = os.fsync, False, []

def tree():
    found = {}
    for path in sorted(state.rglob("*")):
        content = None
        if not path.is_dir():
            content = contents.setdefault(path.read_bytes(), len(contents))
        found[str(path.relative_to(state))] = (path.stat().st_ino, content)
    return found

def note(kind, path=""):
    global recording
    if not recording:  # reading the tree opens files too
        recording = True
        record.append((kind, path, tree()))
        recording = False

def hook(event, arguments):
    if not recording and event in TOUCHES and str(state) in str(arguments[:2]):
        note("step")

def fsync(handle):
    real_fsync(handle)
    path = Path(os.readlink(f"/proc/self/fd/{handle}"))
    note("sync", "." if path == state else str(path.relative_to(state)))

def begin():
    sys.addaudithook(hook)
    os.fsync = fsync

ACT
print(list(contents))
for line in record:
    print(line)
"""
# bundles to update to, or `roll-back`
UPDATES: Final = """
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update

begin()
for what in work:
    store = BundleStore(state)
    if what == "roll-back":
        store.roll_back("test")
    else:
        outcome = update(state, what)
        assert outcome.status == "installed", outcome
    note("done", what)
"""

Tree = Mapping[str, tuple[int, bytes | None]]
Version = tuple[int, bytes | None] | None  # identity and bytes; None: no such name


@dataclass(frozen=True)
class Moment:
    """One moment of a record."""

    kind: str
    path: str
    tree: Tree


@dataclass
class Disk:
    """What is certain to be on the disk, and what may be.

    Attributes:
        names: for each path the versions it may have: first the one that is certain.
        bytes: for each file, by identity, the contents it may have: first the certain one.
    """

    names: dict[str, list[Version]]
    bytes: dict[int, list[bytes]]


def record(state: Path, *work: str, act: str = UPDATES) -> list[Moment]:
    """The moments of a child that does this work in a state folder.

    Args:
        act: the program that does it, which calls `begin` first, and `note("done", what)` after
            each piece of `work`.
    """
    program = RECORDER.replace("ACT", act)
    command = [sys.executable, "-P", "-c", program, str(state), *work]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    contents, *lines = map(ast.literal_eval, done.stdout.splitlines())

    def tree(found: Mapping[str, tuple[int, int | None]]) -> Tree:
        return {
            path: (inode, None if number is None else contents[number])
            for path, (inode, number) in found.items()
        }

    return [Moment(kind, path, tree(found)) for kind, path, found in lines]


def disks(before: Tree, moments: list[Moment], *, synced: bool = True) -> Iterator[Disk]:
    """What the disk may hold at each moment.

    Args:
        before: tree of the folder at the start, all of it on the disk.
        synced: False leaves every fsync out: the control, which must find damage.
    """
    identities = _Identities()
    tree = identities.of(before)
    names: dict[str, list[Version]] = {path: [version] for path, version in tree.items()}
    contents = {version[0]: [version[1] or b""] for version in tree.values()}
    for moment in moments:
        tree = identities.of(moment.tree)
        for path in names.keys() | tree.keys():
            version = tree.get(path)
            history = names.setdefault(path, [None])
            if _identity(history[-1]) != _identity(version):
                history.append(version)
        for identity, content in tree.values():
            # a new file is empty on the disk until it is synced
            history_of_bytes = contents.setdefault(identity, [b""])
            if content is not None and content != history_of_bytes[-1]:
                history_of_bytes.append(content)
        if moment.kind == "sync" and synced:
            _sync(moment.path, tree, names, contents)
        yield Disk(
            {path: list(history) for path, history in names.items()},
            {identity: list(history) for identity, history in contents.items()},
        )


def least(disk: Disk) -> dict[str, bytes | None]:
    """The state in which nothing is there but what is certain."""
    return _state(disk, lambda versions: versions[0], lambda contents: contents[0])


def renamed_without_bytes(disk: Disk) -> dict[str, bytes | None]:
    """The state in which all names are there, and the bytes that are certain: the common damage."""
    return _state(disk, lambda versions: versions[-1], lambda contents: contents[0])


def drawn(disk: Disk, draw: random.Random) -> dict[str, bytes | None]:
    """One of all the states, at random."""

    def torn(contents: list[bytes]) -> bytes:
        if len(contents) == 1:
            return contents[0]
        whole = draw.choice(contents)
        return draw.choice(
            (whole, whole[: draw.randrange(len(whole) + 1)], bytes(len(whole)), contents[0])
        )

    return _state(disk, draw.choice, torn)


def write(state: Mapping[str, bytes | None], folder: Path) -> None:
    """Make the folder hold that state."""
    for path, content in sorted(state.items()):
        if not (folder / path).parent.is_dir():
            continue  # its folder was lost
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def tree_of(folder: Path) -> Tree:
    """The tree of a folder, as RECORDER has it."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_ino,
            None if path.is_dir() else path.read_bytes(),
        )
        for path in sorted(folder.rglob("*"))
    }


class _Identities:
    """Numbers of files that are never used again, as inodes are."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._next = 0

    def of(self, tree: Tree) -> dict[str, tuple[int, bytes | None]]:
        """The tree with identities in the place of inodes."""
        known: dict[int, int] = {}
        for inode, _ in tree.values():
            if inode not in known:
                known[inode] = self._known.get(inode, self._next)
                self._next += known[inode] == self._next
        self._known = known
        return {path: (known[inode], content) for path, (inode, content) in tree.items()}


def _identity(version: Version) -> int | None:
    return None if version is None else version[0]


def _sync(
    synced: str,
    tree: Mapping[str, tuple[int, bytes | None]],
    names: dict[str, list[Version]],
    contents: dict[int, list[bytes]],
) -> None:
    """Make certain what fsync of that path makes certain: a file's bytes, or a folder's names."""
    if synced != "." and tree[synced][1] is not None:
        identity = tree[synced][0]
        contents[identity] = contents[identity][-1:]
        return
    for path, history in names.items():
        if str(Path(path).parent) == synced:
            del history[:-1]


def _state(disk: Disk, name: Any, content: Any) -> dict[str, bytes | None]:
    """A state: for each path one of its versions, for each file one of its contents."""
    chosen: dict[str, Version] = {}
    for path, versions in disk.names.items():
        chosen[path] = versions[0] if len(versions) == 1 else name(versions)
    # a rename is one step: the old name is lost only where the new one is there
    there = {_identity(version) for version in chosen.values()}
    for path, versions in disk.names.items():
        before = versions[0]
        moved = before is not None and any(
            _identity(other[-1]) == before[0] for at, other in disk.names.items() if at != path
        )
        if chosen[path] is None and moved and before is not None and before[0] not in there:
            chosen[path] = before
            there.add(before[0])
    bytes_of: dict[int, bytes] = {}
    state: dict[str, bytes | None] = {}
    for path, version in chosen.items():
        if version is None:
            continue
        identity, raw = version
        if raw is None:
            state[path] = None
            continue
        if identity not in bytes_of:
            bytes_of[identity] = content(disk.bytes[identity])
        state[path] = bytes_of[identity]
    return state
