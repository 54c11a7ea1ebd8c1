"""Work that torch puts off until first use, done before a deadline waits for it."""

from __future__ import annotations

import torch


def warm_up() -> None:
    """Make a first optimiser, and have this thread look up how many threads were set.

    The first one imports torch's compiler: 2.4 s on a core of its own, longer than a step may take.
    A new thread's first convolution takes all cores, whatever is set, if torch is not asked; and
    the last bits depend on their number.
    """
    torch.get_num_threads()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
