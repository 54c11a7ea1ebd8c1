"""Contributions that wait on the disk: the same bits when read, and gone afterwards."""

from __future__ import annotations

import gc
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.errors import StorageError
from edge_sdk.training.protocol.messages import Update, Weights
from server.training.core.spool import Spool
from server.training.core.weighted_mean import Contribution, merge
from server.training.recipe.recipe import read_recipe
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.shelved_client import ShelvedClient

BASE: dict[str, Any] = {
    "data": {"name": "digits", "clients": 5, "train_max": 200, "test_max": 50},
    "train": {
        "backbone": "tiny",
        "rounds": 2,
        "learning_rate": 0.1,
        "batch": 16,
        "momentum": 0.9,
        "memory_gb": [1, 4],
    },
}


def world(method: str, folder: Path | None = None, **settings: Any) -> Simulation:
    return build_simulation(
        read_recipe({"method": method, "round": settings} | BASE), folder=folder
    )


def weights(world: Simulation) -> Weights:
    for number in (1, 2):
        assert world.loop.run_round(number, 0).merged
    return world.state.read()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    # EFBIG for this process, as a full disk: SIGXFSZ is ignored by Python
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_what_is_read_is_what_was_put_to_the_last_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"a": (3, 4), "b": (), "c": (0, 7), "d": (5,)}
    put = {n: (torch.randn(s, generator=generator) * 9).to(dtype) for n, s in shapes.items()}
    put["across"] = torch.arange(6).reshape(2, 3).T.to(dtype)  # not contiguous
    with Spool(tmp_path) as spool:
        first, second = spool.put(put), spool.put({"a": put["a"] + 1})
        assert list(first) == list(put)
        for name, tensor in put.items():
            assert torch.equal(first[name], tensor)
            assert first[name].dtype == dtype
        assert torch.equal(second["a"], put["a"] + 1)
        assert torch.equal(first.part("a", 5, 9), put["a"].flatten()[5:9])


def test_the_file_has_no_name_and_is_closed_with_the_round(tmp_path: Path) -> None:
    before = descriptors()
    with Spool(tmp_path) as spool:
        spool.put({"a": torch.ones(1000)})
        assert list(tmp_path.iterdir()) == []
        assert descriptors() == before + 1
    assert descriptors() == before


def test_a_full_disk_says_how_much_is_missing_and_where(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool, file_size_limit(1000):
        spool.put({"a": torch.ones(200)})
        with pytest.raises(StorageError, match=r"needs .* MB, has .* MB") as found:
            spool.put({"b": torch.ones(200)})
    assert str(tmp_path) in str(found.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        Spool(tmp_path / "nowhere")


def test_a_file_cut_short_is_no_weights(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        kept = spool.put({"a": torch.ones(10)})
        spool._file.truncate(20)
        with pytest.raises(StorageError, match="cut short"):
            kept["a"]


# copies, heads that are shared, heads that are not, and one model for all with a vote of its own
@pytest.mark.parametrize("method", ["fedavg", "splitfed-v1", "multi-exit", "splitlpf"])
def test_a_round_ends_in_the_same_bits_with_and_without_the_disk(
    method: str, tmp_path: Path
) -> None:
    in_memory = weights(world(method))
    on_disk = weights(world(method, tmp_path, cohort=2))
    assert in_memory.keys() == on_disk.keys()
    for name, tensor in in_memory.items():
        assert torch.equal(tensor, on_disk[name]), name


def test_a_shared_suffix_in_cohorts_is_merged_from_the_disk_as_from_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # its cohorts change the result, so what is compared is where contributions wait
    on_disk = weights(world("supersfl", cohort=2))
    monkeypatch.setattr(Contribution, "spool", lambda self, _spool: self)
    in_memory = weights(world("supersfl", cohort=2))
    for name, tensor in in_memory.items():
        assert torch.equal(tensor, on_disk[name]), name


def test_weights_of_the_same_form_take_the_place_of_old_ones(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        first = spool.put({"a": torch.zeros(10), "b": torch.zeros(3)})
        other = spool.put({"a": torch.ones(10), "b": torch.ones(3)})
        again = spool.replace(first, {"a": torch.full((10,), 2.0), "b": torch.full((3,), 3.0)})
        longer = spool.replace(other, {"a": torch.full((11,), 4.0)})

        assert again.offset == first.offset
        assert longer.offset > other.offset
        assert again.layout is other.layout
        assert again["a"].tolist() == [2.0] * 10
        assert again["b"].tolist() == [3.0] * 3
        assert other["b"].tolist() == [1.0] * 3
        assert longer["a"].tolist() == [4.0] * 11


def test_a_shelved_client_keeps_its_personal_weights_on_the_disk(tmp_path: Path) -> None:
    x, y = np.zeros((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
    with Spool(tmp_path) as shelf:
        one, other = (ShelvedClient(shelf, name, x, y) for name in "ab")
        assert one.personal == {}

        one.keep({"back.weight": torch.ones(2, 3)}, 1)
        other.keep({"back.weight": torch.zeros(2, 3)}, 1)
        one.keep({"back.bias": torch.ones(2)}, 2)

        assert torch.equal(one.personal["back.weight"], torch.ones(2, 3))
        assert torch.equal(one.personal["back.bias"], torch.ones(2))
        assert torch.equal(other.personal["back.weight"], torch.zeros(2, 3))
        other.personal = {}
        assert other.personal == {}


def test_weights_that_a_worker_takes_and_gives_back_keep_their_place_on_the_disk(
    tmp_path: Path,
) -> None:
    x, y = np.zeros((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
    with Spool(tmp_path) as shelf:
        here = ShelvedClient(shelf, "a", x, y)
        kept: Weights = {}
        ends = []
        for number in range(1, 4):
            here.personal = kept
            here.keep({"back.weight": torch.full((2, 3), float(number))}, number)
            kept, here.personal = here.personal, {}
            assert here.personal == {}
            assert torch.equal(kept["back.weight"], torch.full((2, 3), float(number)))
            ends.append(shelf.put({}).offset)  # where the file ends
    assert ends == [24, 24, 24]  # six floats


def test_without_cohorts_nothing_is_opened() -> None:
    nowhere = Path("/nowhere/at/all")
    assert weights(world("fedavg", nowhere))
    assert weights(world("fedavg", nowhere, cohort=5))  # all of them are one cohort
    with pytest.raises(StorageError, match="nowhere"):
        weights(world("fedavg", nowhere, cohort=4))


def _fleet(count: int, keep: Callable[[Contribution], Contribution]) -> dict[str, Contribution]:
    fleet = {}
    for number in range(count):
        tensors = {f"stage{s}.weight": torch.full((50_000,), float(number)) for s in range(4)}
        fleet[str(number)] = keep(Contribution(4, Update(1, tensors, 1, 1.0, 1, 1)))
    return fleet


def test_a_merge_from_the_disk_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """By what Python sees: the tensors that are read lie in bytearrays."""
    server = {f"stage{stage}.weight": torch.zeros(50_000) for stage in range(4)}
    with Spool(tmp_path) as spool:
        fleet = _fleet(30, lambda c: c.spool(spool))
        equal = dict.fromkeys(fleet, 1 / 30)
        gc.collect()
        tracemalloc.start()
        merged = merge(fleet, equal, server, 0.0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 3 * 50_000 * 4
    for tensor in merged.values():
        torch.testing.assert_close(tensor, torch.full((50_000,), 14.5))
