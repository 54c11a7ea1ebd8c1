"""Run a program that the kernel ends with its parent: `python -P -m server.broker.die_with_parent`.

    python -P -m server.broker.die_with_parent PARENT_PID PROGRAM [ARGUMENT ...]

It asks the kernel for SIGTERM when the parent dies, and then becomes the program. Linux only.
"""

from __future__ import annotations

import os
import signal
import sys

from edge_sdk.processes.end_with_parent import end_with_parent
from server.listening.descriptors import raise_descriptor_limit


def main(parent: int, command: list[str]) -> None:
    """Become `command`; it ends when the process `parent` does, also when that is killed."""
    end_with_parent(parent, signal.SIGTERM)
    raise_descriptor_limit()
    os.execv(command[0], command)  # noqa: S606 - the path of a program that the server found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
