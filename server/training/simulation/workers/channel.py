"""Values between a simulation and its workers: as bytes, and over a pipe.

Values are pickled, which is safe between a process and the workers that it has started: children
over a pipe, or actors of a Ray cluster, whose own calls are pickled too and which runs any code of
whoever may use it. Tensors travel as bytes and are laid out anew by torch, contiguous, as those of
a message from a device are: so the last bits do not depend on the process.
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


def encode(value: object) -> bytes:
    """A value as bytes."""
    return _encoded(value).getvalue()


def decode(raw: bytes) -> Any:
    """The value that `encode` was given."""
    return pickle.loads(raw)  # noqa: S301 - from our own worker, or the simulation that started it


def send(connection: Connection, value: object) -> None:
    """Send a value.

    Raises: OSError if nobody reads.
    """
    connection.send_bytes(_encoded(value).getbuffer())


def receive(connection: Connection) -> Any:
    """The next value; waits for it.

    Raises: EOFError, OSError if the other side has ended.
    """
    return decode(connection.recv_bytes())


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.detach().contiguous().numpy(),)
        return NotImplemented


def _encoded(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).clone()
