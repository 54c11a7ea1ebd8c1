"""Settings of the C library's memory, on releases of glibc that take them and that do not."""

from __future__ import annotations

import pytest

from server.training.simulation import allocator

TRIM, MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


class Glibc:
    """mallopt by the rules of a release: 1 where it takes a value, else 0.

    largest: block that it can be told to keep; 32 MiB before 2.35.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.taken: dict[int, int] = {}

    def mallopt(self, name: int, value: int) -> int:
        if name == MMAP and value > self._largest:
            return 0
        self.taken[name] = value
        return 1


@pytest.mark.parametrize("largest", [1 << 25, 1 << 62])
def test_blocks_are_kept_as_large_as_the_c_library_takes_them(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit of its own, a set trim limit fixes the other at 128 KiB."""
    library = Glibc(largest)
    monkeypatch.setattr(allocator, "_glibc", lambda: library)
    allocator.keep_freed_memory.__wrapped__()
    assert library.taken == {
        MMAP: min(largest, allocator.KEPT_BYTES),
        TRIM: allocator.KEPT_BYTES,
    }
