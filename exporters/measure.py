"""Cost of a super-network stage by stage, and speed of its graphs, on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from edge_sdk.manifest import GraphSpec
from edge_sdk.nets import Supernet
from edge_sdk.session import Session
from profiles.cost import TRAINED_WEIGHT_BYTES, WEIGHT_BYTES, CostTable, StageCost
from profiles.device import probe

# enough for a median that another process does not move; a slow stage stops at the time limit
_RUNS: Final = 30
_SECONDS_A_STAGE: Final = 0.5
_ROUNDS: Final = 7
_SECONDS_A_GRAPH: Final = 0.35
# BatchNorm cannot train on one value a channel, so two samples are traced, and bytes are halved
_TRACED: Final = 2


def measure_cost(net: Supernet, x: NDArray[Any]) -> CostTable:
    """The cost table of a super-network: counts are exact, latencies are measured.

    Args:
        net: not changed; a copy runs.
        x: (n, ...) raw inputs, at least one.

    Latency is the median of torch's forward pass on one thread. Operations that torch's flop
    counter does not know (activations, pools, normalisation) count as 0.
    """
    own = deepcopy(net).cpu().eval()
    # repeated, not sliced: x may be a single sample
    z = torch.from_numpy(np.repeat(x[:1], _TRACED, axis=0))
    stages: list[StageCost] = []
    exits: dict[int, StageCost] = {}
    with one_torch_thread():
        for depth, stage in enumerate(own.stages, start=1):
            first = depth == 1
            module = nn.Sequential(own.normalise, stage) if first else stage
            stages.append(_measure(f"stage{depth}", module, z, holds_input=first))
            with torch.no_grad():
                z = module(z)
            if depth in own.cuts:
                head = own.exit_head(depth)
                exits[depth] = _measure(f"exit{depth}", head, z, holds_input=False)
        final = _measure("head", own.head, z, holds_input=False)
    return CostTable(tuple(stages), exits, final, probe().core_score_gflops)


def median_latency_us(path: Path, graph: GraphSpec) -> float:
    """Median latency of an ONNX file on one thread, in microseconds."""
    return median_latencies_us([path], graph)[0]


def median_latencies_us(paths: Sequence[Path], graph: GraphSpec) -> list[float]:
    """Median latency of each of several files that take the same inputs, in microseconds.

    The files take turns, so that other work of the machine slows all of them alike.
    """
    feeds: dict[str, NDArray[Any]] = {
        name: np.zeros((1, *spec.shape), spec.dtype) for name, spec in graph.inputs.items()
    }
    sessions = [Session(path) for path in paths]
    seconds: list[list[float]] = [[] for _ in sessions]
    for _ in range(_ROUNDS):
        for session, taken in zip(sessions, seconds, strict=True):
            run = _runner(session, feeds)
            run()
            taken.extend(_timed(run, _SECONDS_A_GRAPH / _ROUNDS))
    return [1e6 * statistics.median(taken) for taken in seconds]


def _runner(session: Session, feeds: dict[str, NDArray[Any]]) -> Callable[[], object]:
    return lambda: session.run(None, feeds)


def _measure(name: str, module: nn.Module, given: Tensor, *, holds_input: bool) -> StageCost:
    """The cost of one part of the network for one sample of its input `given`."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    one = given[:1]
    # the counter knows attention as matrix products, not in the CPU's fused form
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = module(one)
    activations = WEIGHT_BYTES * (one.numel() + output.numel())
    return StageCost(
        name=name,
        parameters=parameters,
        flops=counter.get_total_flops(),
        activation_bytes=WEIGHT_BYTES * output.numel(),
        inference_peak_bytes=WEIGHT_BYTES * parameters + activations,
        training_peak_bytes=TRAINED_WEIGHT_BYTES * parameters
        + _kept_bytes(module, given, holds_input=holds_input),
        latency_ms=1e3 * statistics.median(_time_module(module, one)),
    )


def _kept_bytes(module: nn.Module, given: Tensor, *, holds_input: bool) -> int:
    """Bytes that autograd keeps for the backward pass of one sample, the output included."""
    module = deepcopy(module).train()
    fed = given.clone()
    if fed.is_floating_point() and not holds_input:
        fed.requires_grad_()
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(module(fed))
    for tensor in (*module.parameters(), *module.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    if not holds_input:
        kept.pop(fed.untyped_storage().data_ptr(), None)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return -(-total // _TRACED)


def _time_module(module: nn.Module, one: Tensor) -> list[float]:
    with torch.inference_mode():
        module(one)
        return _timed(lambda: module(one), _SECONDS_A_STAGE, at_most=_RUNS)


def _timed(run: Callable[[], object], limit_s: float, *, at_most: int | None = None) -> list[float]:
    """Seconds of each call, until the time limit or `at_most` calls; at least 3 calls."""
    seconds: list[float] = []
    end = time.perf_counter() + limit_s
    while len(seconds) < 3 or (
        time.perf_counter() < end and (at_most is None or len(seconds) < at_most)
    ):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute in one thread while the block runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
