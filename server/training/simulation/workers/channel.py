"""Values between a simulation and its worker processes, over a pipe.

Values are pickled, which is safe between a process and the children that it has started; nothing
from a network comes this way. Tensors travel as bytes and are laid out anew by torch, contiguous,
as those of a message from a device are: so the last bits do not depend on the process.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(connection: Connection, value: object) -> None:
    """Send a value.

    Raises: OSError if nobody reads.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    connection.send_bytes(buffer.getbuffer())


def receive(connection: Connection) -> Any:
    """The next value; waits for it.

    Raises: EOFError, OSError if the other side has ended.
    """
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own child or parent


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.detach().contiguous().numpy(),)
        return NotImplemented


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).clone()
