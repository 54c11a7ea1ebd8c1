"""ONNX operators in torch, as their specification has them.

Each takes the node's attributes and its inputs, None where one is left out, and returns what the
node makes. `exporters.adopt.graph.gradients` runs a graph by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from onnx import NodeProto, helper
from torch import Tensor
from torch.nn import functional

from exporters.errors import ExportError

Made = Tensor | Sequence[Tensor]
Operator = Callable[..., Made]

PADDINGS: Final = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}


class Attributes:
    """The attributes of a node, and the version of the operators."""

    def __init__(self, node: NodeProto, opset: int) -> None:
        self.opset = opset
        self.outputs = len(node.output)
        self._values = {each.name: helper.get_attribute_value(each) for each in node.attribute}

    def __call__(self, name: str, default: Any = None) -> Any:
        """An attribute's value, a text as str."""
        value = self._values.get(name, default)
        return value.decode() if isinstance(value, bytes) else value


def _need(condition: bool, form: str) -> None:
    if not condition:
        raise ExportError(f"no gradients of {form}")


def _windows(a: Attributes, x: Tensor, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """Strides, and the padding of each axis behind the channels, as `functional.pad` takes it."""
    axes = len(kernel)
    strides = list(a("strides", [1] * axes))
    dilations = list(a("dilations", [1] * axes))
    pads = list(a("pads", [0] * 2 * axes))
    mode = a("auto_pad", "NOTSET")
    if mode.startswith("SAME"):
        for axis in range(axes):
            size = x.shape[2 + axis]
            reach = dilations[axis] * (kernel[axis] - 1) + 1
            places = math.ceil(size / strides[axis])
            missing = max(0, (places - 1) * strides[axis] + reach - size)
            pads[axis], pads[axes + axis] = missing // 2, missing - missing // 2
            if mode == "SAME_LOWER":
                pads[axis], pads[axes + axis] = pads[axes + axis], pads[axis]
    return strides, [pads[side + axis] for axis in reversed(range(axes)) for side in (0, axes)]


def _conv(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kernel = weight.shape[2:]
    strides, pads = _windows(a, x, kernel)
    run = (functional.conv1d, functional.conv2d, functional.conv3d)[len(kernel) - 1]
    dilations = list(a("dilations", [1] * len(kernel)))
    return run(functional.pad(x, pads), weight, bias, strides, 0, dilations, a("group", 1))


def _max_pool(a: Attributes, x: Tensor) -> Tensor:
    kernel = a("kernel_shape")
    strides, pads = _windows(a, x, kernel)
    run = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(kernel) - 1]
    dilations = list(a("dilations", [1] * len(kernel)))
    padded = functional.pad(x, pads, value=-math.inf)
    pooled: Tensor = run(padded, kernel, strides, 0, dilations, bool(a("ceil_mode", 0)))
    return pooled


def _average_pool(a: Attributes, x: Tensor) -> Tensor:
    _need(set(a("dilations", [1])) == {1}, "AveragePool with dilations")
    kernel = a("kernel_shape")
    strides, pads = _windows(a, x, kernel)
    run: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
    ceil = bool(a("ceil_mode", 0))
    _need(not (ceil and any(pads)), "AveragePool with padding and ceil_mode")

    def pooled(given: Tensor) -> Tensor:
        mean: Tensor = run[len(kernel) - 1](functional.pad(given, pads), kernel, strides, 0, ceil)
        return mean

    if not any(pads) or a("count_include_pad", 0):
        return pooled(x)
    return pooled(x) / pooled(torch.ones_like(x[:1, :1]))


def _batch_norm(a: Attributes, x: Tensor, *given: Tensor) -> Tensor:
    _need(not a("training_mode", 0), "BatchNormalization in training mode")
    scale, bias, mean, variance = given
    epsilon = a("epsilon", 1e-5)
    return functional.batch_norm(x, mean, variance, scale, bias, eps=epsilon)


def _layer_norm(a: Attributes, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[a("axis", -1) :]
    return functional.layer_norm(x, shape, scale, bias, a("epsilon", 1e-5))


def _gemm(a: Attributes, left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    left = left.T if a("transA", 0) else left
    right = right.T if a("transB", 0) else right
    product: Tensor = a("alpha", 1.0) * (left @ right)
    return product if added is None else product + a("beta", 1.0) * added


def _clip(
    a: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Tensor:
    least = a("min") if low is None else low.item()
    most = a("max") if high is None else high.item()
    return x if least is None and most is None else torch.clamp(x, least, most)


def _reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    sizes = [int(size) for size in shape]
    if not a("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(a: Attributes, x: Tensor) -> Tensor:
    axis = a("axis", 1)
    return x.reshape(math.prod(x.shape[: axis if axis >= 0 else axis + x.ndim]), -1)


def _axes(a: Attributes, given: Tensor | None) -> list[int] | None:
    """Axes from an input, as newer operators have them, or from the attribute."""
    axes = a("axes") if given is None else [int(axis) for axis in given.flatten()]
    return axes or None


def _squeeze(a: Attributes, x: Tensor, given: Tensor | None = None) -> Tensor:
    axes = _axes(a, given)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueeze(a: Attributes, x: Tensor, given: Tensor | None = None) -> Tensor:
    axes = _axes(a, given) or []
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _reduced(run: Callable[..., Tensor]) -> Operator:
    def reduce(a: Attributes, x: Tensor, given: Tensor | None = None) -> Tensor:
        axes = _axes(a, given)
        if axes is None and a("noop_with_empty_axes", 0):
            return x
        return run(x, tuple(range(x.ndim)) if axes is None else tuple(axes), bool(a("keepdims", 1)))

    return reduce


def _softmax(a: Attributes, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
    if a.opset >= 13:
        return run(x, dim=a("axis", -1))
    axis = a("axis", 1) % x.ndim
    return run(x.reshape(math.prod(x.shape[:axis]), -1), dim=1).reshape(x.shape)


def _slice(a: Attributes, x: Tensor, *given: Tensor | None) -> Tensor:
    starts, ends, axes, steps = [*given, None, None, None, None][:4]

    def listed(name: str, tensor: Tensor | None, default: Any = None) -> list[int]:
        return list(a(name, default)) if tensor is None else [int(each) for each in tensor]

    first, last = listed("starts", starts), listed("ends", ends)
    places = listed("axes", axes, range(len(first)))
    strides = listed("steps", steps, [1] * len(first))
    for start, end, axis, step in zip(first, last, places, strides, strict=True):
        rows = range(*slice(start, end, step).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(list(rows), dtype=torch.int64))
    return x


def _gather(a: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = a("axis", 0) % x.ndim
    rows = indices.flatten() % x.shape[axis]
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, rows).reshape(shape)


def _split(a: Attributes, x: Tensor, given: Tensor | None = None) -> Sequence[Tensor]:
    axis = a("axis", 0)
    sizes = a("split") if given is None else [int(size) for size in given]
    if sizes is None:
        return torch.split(x, math.ceil(x.shape[axis] / a.outputs), axis)
    return torch.split(x, list(sizes), axis)


def _pad(
    a: Attributes,
    x: Tensor,
    given: Tensor | None = None,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> Tensor:
    pads = list(a("pads")) if given is None else [int(each) for each in given]
    places = list(range(x.ndim)) if axes is None else [int(axis) % x.ndim for axis in axes]
    sides = [(0, 0)] * x.ndim
    for place, axis in enumerate(places):
        sides[axis] = (pads[place], pads[len(places) + place])
    flat = [size for pair in reversed(sides) for size in pair]
    _need(a("mode", "constant") in PADDINGS, f"Pad in the mode {a('mode')}")
    mode = PADDINGS[a("mode", "constant")]
    if mode == "constant":
        return functional.pad(x, flat, value=float(a("value", 0.0) if value is None else value))
    while flat[-2:] == [0, 0]:  # torch pads the last axes alone in these modes
        flat = flat[:-2]
    return functional.pad(x, flat, mode=mode)


def _expand(_: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    sizes = [int(size) for size in shape]
    # a size of 1 leaves the axis as it is
    own = (1,) * (len(sizes) - x.ndim) + tuple(x.shape)
    given = [1] * (len(own) - len(sizes)) + sizes
    return x.expand([mine if size == 1 else size for mine, size in zip(own, given, strict=True)])


def _cast(a: Attributes, x: Tensor) -> Tensor:
    kind = helper.tensor_dtype_to_np_dtype(a("to"))
    return x.to(torch.from_numpy(np.zeros(0, kind)).dtype)


def _shape(a: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape)[a("start", 0) : a("end")])


def _transpose(a: Attributes, x: Tensor) -> Tensor:
    return x.permute(list(a("perm", reversed(range(x.ndim)))))


def _div(_: Attributes, left: Tensor, right: Tensor) -> Tensor:
    whole = not (left.is_floating_point() or right.is_floating_point())
    return torch.div(left, right, rounding_mode="trunc" if whole else None)


def _dropout(_: Attributes, x: Tensor, *given: Tensor | None) -> Tensor:
    _need(len(given) < 2 or given[1] is None or not bool(given[1]), "Dropout in training mode")
    return x


def _selu(a: Attributes, x: Tensor) -> Tensor:
    bent: Tensor = functional.elu(x, a("alpha", 1.6732632423543772))
    return bent * float(a("gamma", 1.0507009873554805))


def _pointwise(run: Callable[..., Tensor]) -> Operator:
    return lambda _, *given: run(*given)


OPERATORS: Final[Mapping[str, Operator]] = {
    "Abs": _pointwise(torch.abs),
    "Add": _pointwise(torch.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": lambda a, *given: torch.cat(given, a("axis")),
    "Conv": _conv,
    "Div": _div,
    "Dropout": _dropout,
    "Einsum": lambda a, *given: torch.einsum(a("equation"), *given),
    "Elu": lambda a, x: functional.elu(x, a("alpha", 1.0)),
    "Erf": _pointwise(torch.erf),
    "Exp": _pointwise(torch.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": lambda a, x: functional.gelu(x, approximate=a("approximate", "none")),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda _, x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    "GlobalMaxPool": lambda _, x: x.amax(tuple(range(2, x.ndim)), keepdim=True),
    "HardSigmoid": lambda a, x: torch.clamp(a("alpha", 0.2) * x + a("beta", 0.5), 0, 1),
    "HardSwish": _pointwise(functional.hardswish),
    "Identity": lambda _, x: x,
    "LRN": lambda a, x: functional.local_response_norm(
        x, a("size"), a("alpha", 1e-4), a("beta", 0.75), a("bias", 1.0)
    ),
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda a, x: functional.leaky_relu(x, a("alpha", 0.01)),
    "Log": _pointwise(torch.log),
    "LogSoftmax": lambda a, x: _softmax(a, x, torch.log_softmax),
    "MatMul": _pointwise(torch.matmul),
    "MaxPool": _max_pool,
    "Mish": _pointwise(functional.mish),
    "Mul": _pointwise(torch.mul),
    "Neg": _pointwise(torch.neg),
    "PRelu": lambda _, x, slope: torch.where(x < 0, slope * x, x),
    "Pad": _pad,
    "Pow": _pointwise(torch.pow),
    "Reciprocal": _pointwise(torch.reciprocal),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    "Relu": _pointwise(torch.relu),
    "Reshape": _reshape,
    "Selu": _selu,
    "Shape": _shape,
    "Sigmoid": _pointwise(torch.sigmoid),
    "Slice": _slice,
    "Softmax": lambda a, x: _softmax(a, x, torch.softmax),
    "Softplus": _pointwise(functional.softplus),
    "Split": _split,
    "Sqrt": _pointwise(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _pointwise(torch.sub),
    "Sum": lambda _, *given: sum(given[1:], given[0]),
    "Tanh": _pointwise(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
