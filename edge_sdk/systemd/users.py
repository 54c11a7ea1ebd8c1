"""Users of a system, which may be an image that does not run."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edge_sdk.errors import StorageError


@dataclass(frozen=True, slots=True)
class SystemUser:
    """A user, by the numbers that the system has for it.

    Attributes:
        uid: its number.
        gid: number of its own group.
        groups: numbers of all its groups.
    """

    uid: int
    gid: int
    groups: frozenset[int]

    @classmethod
    def find(cls, name: str, root: Path) -> Self:
        """Look a user up in the system at `root`.

        Raises: StorageError if that system has no such user.
        """
        for line in (root / "etc/passwd").read_text().splitlines():
            user, _, uid, gid, *_ = line.split(":")
            if user == name:
                return cls(int(uid), int(gid), frozenset({int(gid), *_groups(name, root)}))
        raise StorageError(f"{root / 'etc/passwd'}: systemd-sysusers made no user {name}")

    def reads(self, path: Path, root: Path) -> bool:
        """Whether the mode of a file, and of its folders below `root`, lets this user read it.

        Access control lists are not looked at.
        """
        folders = path.relative_to(root).parents
        return self._may(path, stat.S_IROTH) and all(
            self._may(root / folder, stat.S_IXOTH) for folder in folders
        )

    def _may(self, path: Path, right: int) -> bool:
        """Whether a right, given as that of others, is this user's too."""
        found = path.stat()
        if found.st_uid == self.uid:
            right <<= 6
        elif found.st_gid in self.groups:
            right <<= 3
        return self.uid == 0 or bool(found.st_mode & right)


def _groups(name: str, root: Path) -> list[int]:
    lines = (root / "etc/group").read_text().splitlines()
    rows = [line.split(":") for line in lines if line.count(":") >= 3]
    return [int(row[2]) for row in rows if name in row[3].split(",")]
