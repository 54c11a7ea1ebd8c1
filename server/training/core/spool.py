"""Contributions of a round's clients, on disk until the round is merged.

In cohorts the clients of a round are visited a few at a time, but every contribution is needed
until the last client has been heard. They lie in a file without a name, which is gone with the
process, however that ends. The file is read and written, not mapped: mapped pages count as the
process's memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from edge_sdk.durable import storage_error
from edge_sdk.errors import StorageError


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor: `offset` bytes into the file, and its form when it is read."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Spool:
    """Keeps weights on disk while it is open.

    Args:
        folder: where the file is; the system's temporary folder where None.
    Raises: StorageError if no file can be opened there.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed by `close`
                dir=self._folder, buffering=0
            )
        except OSError as err:
            raise storage_error(self._folder / "spool", 0, err) from err
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the space back; nothing can be read afterwards."""
        self._file.close()

    def put(self, weights: Mapping[str, Tensor]) -> SpooledWeights:
        """Write weights to the disk, and give weights that are read from there.

        Raises: StorageError if the disk is full or failing.
        """
        places = {}
        for name, tensor in weights.items():
            places[name] = _Place(self._end, tensor.shape, tensor.dtype, tensor.device)
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._write(flat.numpy().data)
        return SpooledWeights(self, places)

    def read(self, offset: int, size_bytes: int) -> bytearray:
        """Read a part of the file.

        Raises: StorageError.
        """
        raw = bytearray(size_bytes)
        view, done = memoryview(raw), 0
        while done < size_bytes:
            try:
                count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as err:
                raise StorageError(
                    f"{self._folder}: a spooled update cannot be read ({err.strerror});"
                    " check the disk"
                ) from err
            if not count:
                raise StorageError(f"{self._folder}: a spooled update is cut short; check the disk")
            done += count
        return raw

    def _write(self, raw: memoryview) -> None:
        done = 0
        while done < len(raw):
            try:
                done += os.pwrite(self._file.fileno(), raw[done:], self._end + done)
            except OSError as err:
                raise storage_error(self._folder / "spool", len(raw) - done, err) from err
        self._end += len(raw)


class SpooledWeights(Mapping[str, Tensor]):
    """Weights on the disk, read one tensor at a time, each time again."""

    def __init__(self, spool: Spool, places: Mapping[str, _Place]) -> None:
        self._spool = spool
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        return self.part(name, 0, place.shape.numel()).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,) entries of a flattened tensor; no others are read."""
        place = self._places[name]
        if stop <= start:
            return torch.empty(0, dtype=place.dtype, device=place.device)
        width = place.dtype.itemsize
        raw = self._spool.read(place.offset + start * width, (stop - start) * width)
        return torch.frombuffer(raw, dtype=place.dtype).to(place.device)
