"""Processes, their time and their memory, as the kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path


def children(pid: int) -> list[int]:
    """Ids of a process's children, and of theirs; each is listed by the thread that started it."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(word) for each in lists for word in each.read_text(encoding="ascii").split()]
    return [*own, *(one for child in own for one in children(child))]


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
