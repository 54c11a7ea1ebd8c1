"""Work that torch puts off until first use, done before a deadline waits for it."""

from __future__ import annotations

import torch


def warm_up() -> None:
    """Make this thread look up how many threads were set.

    A new thread's first convolution takes all cores, whatever is set, if torch is not asked; and
    the last bits depend on their number.
    """
    torch.get_num_threads()
