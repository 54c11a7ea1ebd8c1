"""The process's limit of open files and sockets."""

from __future__ import annotations

import resource
from typing import Final

WANTED: Final = 65_536


def raise_descriptor_limit() -> int:
    """Allow as many open files and sockets as the machine lets us, at most `WANTED`.

    The usual soft limit of 1,024 is a small fleet.

    Returns: the limit from now on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return WANTED if soft == resource.RLIM_INFINITY else soft
