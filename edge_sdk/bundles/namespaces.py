"""Namespaces of the weights that a device keeps for itself: names that training and bundles share.

A training keeps its tensors under `{namespace}.{name}`, for example `auxiliary.head.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A group of named tensors, kept in one mapping with other groups.

    Attributes:
        name: what stands before the first dot of each key.
    """

    name: str

    def key(self, name: str) -> str:
        """The key under which the tensor `name` of this namespace is kept."""
        return f"{self.name}.{name}"

    def holds(self, key: str) -> bool:
        """Whether a tensor kept under `key` belongs to this namespace."""
        return key.startswith(f"{self.name}.")

    def prefixed(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """`tensors` of this namespace, by the keys under which they are kept."""
        return {self.key(name): tensor for name, tensor in tensors.items()}

    def select(self, kept: Mapping[str, T]) -> dict[str, T]:
        """The tensors of this namespace in `kept`, by their own names."""
        mark = f"{self.name}."
        return {key.removeprefix(mark): t for key, t in kept.items() if key.startswith(mark)}


AUXILIARY: Final = Namespace("auxiliary")  # W_A of BESplit: `extractor.…` and `head.…`
BACK: Final = Namespace("back")  # the last layer, of SplitLPF and HARMONY
# first weights from the server, for a part that the client does not have yet: `first.back.weight`
FIRST: Final = Namespace("first")
INVERSION: Final = Namespace("inversion")  # the decoder of the guard against inversion
DYNAMIC: Final = Namespace("dynamic")  # the gradient of FedDyn's linear term, by parameter
OWN: Final = Namespace("own")  # a whole network of the client's own, of Ditto


def answers(depth: int) -> Namespace:
    """The weights that answer at the cut `depth`, by the names of a bundle's graphs.

    They are ready to run: adapted to the device's data, BatchNorm folded.
    """
    return Namespace(f"answers{depth}")


def auxiliary(depth: int) -> Namespace:
    """The auxiliary model of all clients of the cut `depth`, where the server averages it."""
    return Namespace(f"auxiliary{depth}")


def exit_head(depth: int) -> Namespace:
    """The exit head after the cut `depth`."""
    return Namespace(f"exit{depth}")
