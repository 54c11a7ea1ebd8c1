"""An ext4 that makes no promises, on a loop device, and images of it as a power cut leaves them.

`noauto_da_alloc,data=writeback`: a rename may reach the disk before the bytes of the renamed file,
as on the file systems of cheap cards; the default mount of ext4 hides that. Needs root and a loop
device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SIZE: Final = 24_000_000
OPTIONS: Final = "noauto_da_alloc,data=writeback"
COPIES: Final = 200


class HarshDisk:
    """A disk image of its own file, mounted while it is in use.

    Attributes:
        folder: where it is mounted.
    """

    def __init__(self, image: Path, folder: Path) -> None:
        self._image = image
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @classmethod
    def made(cls, image: Path, folder: Path) -> HarshDisk:
        """A new and empty one."""
        with image.open("wb") as file:
            file.truncate(SIZE)
        _run("mkfs.ext4", "-q", "-F", "-b", "1024", str(image))
        return cls(image, folder)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """Its folder, while it is mounted. What its journal holds is replayed first."""
        _run("mount", "-o", f"loop,{OPTIONS}", str(self._image), str(self.folder))
        try:
            yield self.folder
        finally:
            self._unmount()

    def commit_names(self) -> None:
        """Have the journal write all changes of names, as any program does that syncs a file."""
        with (self.folder / "log-of-another-program").open("ab") as file:
            file.write(b"line\n")
            file.flush()
            os.fsync(file.fileno())

    def copy(self, target: Path) -> None:
        """Copy what is on the disk now, all of one moment: what only the kernel holds is lost."""
        for _ in range(COPIES):
            before = self._writes()
            shutil.copyfile(self._image, target)
            if before == self._writes() and before[0] == 0:
                return
        raise AssertionError(f"{self._image}: written to during each of {COPIES} copies")

    def _writes(self) -> tuple[int, int, int]:
        """Requests in flight, writes and discards of the loop device so far."""
        source = _run("findmnt", "--noheadings", "--output", "SOURCE", str(self.folder)).strip()
        numbers = Path("/sys/block", Path(source).name, "stat").read_text().split()
        return int(numbers[8]), int(numbers[4]), int(numbers[11])

    def _unmount(self) -> None:
        deadline = time.monotonic() + 10
        while subprocess.run(
            ["umount", str(self.folder)], capture_output=True, check=False
        ).returncode:
            assert time.monotonic() < deadline, f"{self.folder} stays busy"
            time.sleep(0.02)  # a process that was killed may still be ending


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
