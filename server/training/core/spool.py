"""Contributions of a round's clients, on disk until the round is merged.

In cohorts the clients of a round are visited a few at a time, but every contribution is needed
until the last client has been heard. They lie in a file without a name, which is gone with the
process, however that ends. The file is read and written, not mapped: mapped pages count as the
process's memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Iterator, Mapping
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
    """The place of a tensor: `offset` bytes into its group, and its form when it is read."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


# places by name; groups of weights of one form share it, since there may be one for each client
Layout = Mapping[str, _Place]


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
        self._layouts: dict[Hashable, Layout] = {}

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
        return self._put(weights, self._end)

    def replace(self, old: SpooledWeights, weights: Mapping[str, Tensor]) -> SpooledWeights:
        """Write weights in the place of old ones, if they have the same form; else as `put`.

        Raises: StorageError if the disk is full or failing.
        """
        same = self._layout(weights) is old.layout
        return self._put(weights, old.offset if same else self._end)

    def _put(self, weights: Mapping[str, Tensor], offset: int) -> SpooledWeights:
        layout = self._layout(weights)
        for name, tensor in weights.items():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._write(flat.numpy().data, offset + layout[name].offset)
        return SpooledWeights(self, layout, offset)

    def _layout(self, weights: Mapping[str, Tensor]) -> Layout:
        """The places of these weights in their group; one object for all groups of this form."""
        form = tuple((name, t.shape, t.dtype, t.device) for name, t in weights.items())
        if form not in self._layouts:
            places, end = {}, 0
            for name, tensor in weights.items():
                places[name] = _Place(end, tensor.shape, tensor.dtype, tensor.device)
                end += tensor.numel() * tensor.element_size()
            self._layouts[form] = places
        return self._layouts[form]

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

    def _write(self, raw: memoryview, offset: int) -> None:
        done = 0
        while done < len(raw):
            try:
                done += os.pwrite(self._file.fileno(), raw[done:], offset + done)
            except OSError as err:
                raise storage_error(self._folder / "spool", len(raw) - done, err) from err
        self._end = max(self._end, offset + len(raw))


class SpooledWeights(Mapping[str, Tensor]):
    """Weights on the disk, read one tensor at a time, each time again."""

    def __init__(self, spool: Spool, layout: Layout, offset: int) -> None:
        self._spool = spool
        self.layout = layout
        self.offset = offset

    def __getitem__(self, name: str) -> Tensor:
        place = self.layout[name]
        return self.part(name, 0, place.shape.numel()).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __contains__(self, name: object) -> bool:
        return name in self.layout

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,) entries of a flattened tensor; no others are read."""
        place = self.layout[name]
        if stop <= start:
            return torch.empty(0, dtype=place.dtype, device=place.device)
        width = place.dtype.itemsize
        raw = self._spool.read(self.offset + place.offset + start * width, (stop - start) * width)
        return torch.frombuffer(raw, dtype=place.dtype).to(place.device)
