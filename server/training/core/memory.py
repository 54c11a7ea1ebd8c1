"""Tensors that are kept by name, a part of them at a time: a method's memory, what was seen."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from torch import Tensor


class MemoryPart(MutableMapping[str, Tensor]):
    """The tensors of a memory with names `KIND/...`, by the rest of the name.

    Reads and writes go to the memory itself. The order is that of the names, so that a resumed run
    meets the tensors as one that was never stopped.
    """

    def __init__(self, memory: MutableMapping[str, Tensor], kind: str) -> None:
        self._memory = memory
        self._start = f"{kind}/"

    def __getitem__(self, name: str) -> Tensor:
        return self._memory[self._start + name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._memory[self._start + name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._memory[self._start + name]

    def __iter__(self) -> Iterator[str]:
        start = self._start
        return iter(sorted(n.removeprefix(start) for n in self._memory if n.startswith(start)))

    def __len__(self) -> int:
        return sum(name.startswith(self._start) for name in self._memory)

    def clear(self) -> None:
        """Remove every tensor of this part."""
        for name in list(self):  # the inherited way sorts all names for each that it removes
            del self[name]
