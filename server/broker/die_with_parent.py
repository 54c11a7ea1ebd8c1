"""Run a program that the kernel ends with its parent: `python -P -m server.broker.die_with_parent`.

    python -P -m server.broker.die_with_parent PARENT_PID PROGRAM [ARGUMENT ...]

It asks the kernel for SIGTERM when the parent dies, and then becomes the program. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from server.listening.descriptors import raise_descriptor_limit

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, command: list[str]) -> None:
    """Become `command`; it ends when the process `parent` does, also when that is killed."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the line above
        raise SystemExit(1)
    raise_descriptor_limit()
    os.execv(command[0], command)  # noqa: S606 - the path of a program that the server found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
