"""A process asks the kernel to end it with the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def end_with_parent(parent: int, signal_number: int) -> None:
    """A signal for this process when the thread ends that started it; Linux alone has that.

    Args:
        parent: process id of the parent.
    Raises: OSError; SystemExit if the parent has ended already.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the line above
        raise SystemExit(1)
