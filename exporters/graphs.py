"""ONNX files of torch modules: the graphs of a bundle, and the server's segments.

Personal parameters stay initialisers and become graph inputs too, so that a run may feed other
values (`overridable`). Their names are those of the module's state_dict: `head.2.weight` is the
exit head's `2.weight`.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from torch import Tensor, nn

from edge_sdk.manifest import GatePolicy, GraphSpec, SegmentSpec, TensorSpec
from edge_sdk.nets import Supernet
from edge_sdk.nets.folding import fold_norms
from exporters.composition import Composition
from exporters.errors import ExportError
from exporters.operator_table import operators_read_once

# Largest batch of the server's segments. The example batch must be larger than 1, because the
# exporter takes an axis of size 1 for a constant.
BATCH_MAX: Final = 256
_EXAMPLE_BATCH: Final = 2
_NOISY: Final = ("torch.onnx", "torch.onnx._internal.exporter", "onnxscript")


class SharedExit(nn.Module):
    """Exit head on the smashed data: one run gives the local answer and the tensor to offload."""

    def __init__(self, prefix: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.prefix = prefix
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Raw input (B, ...) to logits (B, N) and z (B, ...)."""
        z = self.prefix(x)
        return self.head(z), z


@dataclass(frozen=True, slots=True)
class DeviceGraphs:
    """The modules behind the one to three graphs of a bundle, in eval mode.

    Attributes:
        exit: raw input (1, ...) to (logits, z), or to logits alone where there is a `prefix`.
        prefix: raw input to z, for a method with an extractor in its exit.
        back: the reply's features to logits, for a U-shaped method.
        features: shape of one sample of those features; with `back` only.
        personal: names of the submodules of `exit` with overridable parameters.
        kept: names of submodules whose parameters stay in the file under their own names, where a
            device replaces them before it loads the graph. They are constants of the graph, because
            stages with overridable weights ran 1.2 to 1.6 times as long (`cnn8`, `vgg11`).
        gate: uncertainty measure that the exit's gate uses.
        run: id of the training run that the weights come from; empty if unknown.
    """

    exit: nn.Module
    prefix: nn.Module | None = None
    back: nn.Module | None = None
    features: tuple[int, ...] | None = None
    personal: tuple[str, ...] = ("head",)
    kept: tuple[str, ...] = ()
    gate: GatePolicy = "entropy"
    run: str = ""

    def __post_init__(self) -> None:
        if (self.back is None) != (self.features is None):
            raise ExportError("device graphs: expected `back` and `features` together, got one")


def shared_exit(
    net: Supernet,
    depth: int,
    gate: GatePolicy = "entropy",
    run: str = "",
    *,
    own_prefix: bool = False,
) -> DeviceGraphs:
    """Prefix and exit head of a super-network in one graph.

    Args:
        gate: uncertainty measure that the exit heads were trained for: `vacuity-exp` for evidence.
        run: id of their training run, so that a device may use its personal head of that run.
        own_prefix: whether devices of that run have stages of their own too.
    """
    prefix: nn.Module = net.prefix(depth)
    if own_prefix:  # folded as devices fold theirs, so that names and values of the two fit
        prefix = fold_norms(prefix)
    exit_graph = SharedExit(prefix, net.exit_head(depth))
    kept = ("prefix",) if own_prefix else ()
    return DeviceGraphs(exit=exit_graph, kept=kept, gate=gate, run=run)


def own_exit(
    net: Supernet,
    depth: int,
    extractor: nn.Module,
    head: nn.Module,
    run: str = "",
    *,
    gate: GatePolicy = "vacuity-exp",
    own: bool = True,
) -> DeviceGraphs:
    """An auxiliary model that answers on the device (BESplit's W_A), with the prefix as a graph.

    Its logits are evidence, so the gate goes by vacuity. Where devices have models of their own,
    all weights are overridable under the names that a client keeps them by, `extractor.…` and
    `head.…`.

    Args:
        extractor: raw input to features. head: features to logits.
        run: id of the training run, so that a device may use its own W_A of that run.
        own: whether devices have models of their own; not where the model is averaged.
        gate: `vacuity` for a W_A of the releases before, whose evidence is softplus.
    """
    parts = OrderedDict(extractor=fold_norms(extractor), head=head)
    auxiliary = nn.Sequential(parts).eval()
    return DeviceGraphs(
        exit=auxiliary,
        prefix=net.prefix(depth),
        personal=("extractor", "head") if own else (),
        gate=gate,
        run=run,
    )


def write_device_graphs(
    graphs: DeviceGraphs, sample: TensorSpec, folder: Path
) -> dict[str, GraphSpec]:
    """Write `exit.onnx`, and `prefix.onnx` and `back.onnx` if given; the batch is fixed at 1.

    Args:
        sample: dtype and shape of one raw input.
    Returns: the manifest's entry of each graph.
    Raises: ExportError if torch or onnx refuses a module.
    """
    outputs = ["logits", "z"] if graphs.prefix is None else ["logits"]
    specs = {
        "exit": _write_graph(
            graphs.exit,
            ("x", sample),
            outputs,
            folder / "exit.onnx",
            personal=graphs.personal,
            kept=graphs.kept,
        )
    }
    if graphs.prefix is not None:
        path = folder / "prefix.onnx"
        specs["prefix"] = _write_graph(graphs.prefix, ("x", sample), ["z"], path)
    if graphs.back is not None and graphs.features is not None:
        module = nn.Sequential(OrderedDict(back=graphs.back))
        features = ("features", TensorSpec("float32", graphs.features))
        path = folder / "back.onnx"
        specs["back"] = _write_graph(module, features, ["logits"], path, personal=("back",))
    return specs


def write_segments(
    net: Composition,
    sample: TensorSpec,
    folder: Path,
    cuts: Sequence[int],
    *,
    features: bool = False,
) -> Iterator[SegmentSpec]:
    """Write the segments between neighbouring cuts, each one when its spec is asked for.

    Their batch axis takes 1 to 256 samples.

    Args:
        net: in eval mode. sample: dtype and shape of one raw input. cuts: ascending.
        features: end in front of the last layer, which devices run on the reply (`back`).
    Raises: ExportError if torch or onnx refuses a segment.
    """
    entry, given = 0, sample
    for end in (*cuts, None):
        name_in = "x" if entry == 0 else f"z{entry}"
        last = "features" if features else "logits"
        name_out = last if end is None else f"z{end}"
        file = f"{entry}-{'end' if end is None else end}.onnx"
        module = net.segment(entry, end, features=features)
        example = _zeros(given, _EXAMPLE_BATCH)
        (output,) = _outputs(module, example, [name_out]).values()
        model = _export(module, example, [name_in], [name_out], dynamic=True)
        save(model, folder / file)
        yield SegmentSpec(file, entry, end, given, output)
        if end is not None:
            entry, given = end, output


def write_module(
    module: nn.Module, given: tuple[str, TensorSpec], output: str, path: Path, *, dynamic: bool
) -> None:
    """Write a module of one input and one output.

    Args:
        given: name, dtype and shape of one sample. dynamic: take 1 to 256 samples, not one.
    Raises: ExportError if torch or onnx refuses it.
    """
    name, spec = given
    example = _zeros(spec, _EXAMPLE_BATCH if dynamic else 1)
    save(_export(module, example, [name], [output], dynamic=dynamic), path)


def strip(model: onnx.ModelProto) -> None:
    """Remove descriptions of the machine and source code, and operator sets that no node uses."""
    model.doc_string = ""
    del model.metadata_props[:]
    graph = model.graph
    graph.doc_string = ""
    del graph.metadata_props[:]
    described: list[Any] = [*graph.node, *graph.value_info, *graph.input, *graph.output]
    for item in (*described, *graph.initializer):
        item.doc_string = ""
        del item.metadata_props[:]
    used = {node.domain for node in graph.node}
    kept = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def make_overridable(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Make these initialisers graph inputs too; a run need not feed them.

    Raises: ExportError if the graph has no such initialiser.
    """
    held = {initialiser.name: initialiser for initialiser in model.graph.initializer}
    for name in names:
        if name not in held:
            raise ExportError(f"overridable {name}: expected an initialiser of the graph, got none")
        shape = list(held[name].dims)
        info = onnx.helper.make_tensor_value_info(name, held[name].data_type, shape)
        model.graph.input.append(info)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Check a model in full and write it as one file.

    Raises: ExportError if onnx finds a fault, or if weights are outside the file.
    """
    outside = [
        initialiser.name
        for initialiser in model.graph.initializer
        if initialiser.data_location == onnx.TensorProto.EXTERNAL
    ]
    if outside:
        raise ExportError(
            f"{path.name}: expected all weights in the file, got some outside: {outside}"
        )
    try:
        onnx.checker.check_model(model, full_check=True)
        raw = model.SerializeToString(deterministic=True)
    except Exception as err:  # the checker's and protobuf's errors share no base class
        raise ExportError(f"{path.name}: unsound graph ({_first_line(err)})") from err
    path.write_bytes(raw)


def _write_graph(
    module: nn.Module,
    given: tuple[str, TensorSpec],
    outputs: Sequence[str],
    path: Path,
    *,
    personal: Sequence[str] = (),
    kept: Sequence[str] = (),
) -> GraphSpec:
    name, spec = given
    example = _zeros(spec, 1)
    model = _export(module, example, [name], outputs, dynamic=False)
    scopes = (*personal, *kept)
    found = _personal(model, scopes, module)
    if not _all_kept(found, scopes):
        # the exporter drops zeros and joins equal tensors, of which other values would be neither
        distinct = _export(_with_drawn(module, scopes), example, [name], outputs, dynamic=False)
        more = _personal(distinct, scopes, module)
        if len(more) > len(found):
            model, found = distinct, more
            _set_values(model, module, found)
    overridable = tuple(n for n in found if not n.startswith(tuple(f"{k}." for k in kept)))
    make_overridable(model, overridable)
    save(model, path)
    return GraphSpec(
        file=path.name,
        precision="fp32",
        inputs={name: spec},
        outputs=_outputs(module, example, outputs),
        overridable=overridable,
    )


def _personal(model: onnx.ModelProto, scopes: Sequence[str], module: nn.Module) -> tuple[str, ...]:
    """Names of the initialisers that are parameters of these submodules.

    Buffers (such as mean and std of the input) stay fixed. A submodule is personal as a whole or
    not at all: where the graph keeps one of its parameters in another form, as attention's,
    values of a part of them would be of no model.
    """
    held = {initialiser.name for initialiser in model.graph.initializer}
    found: list[str] = []
    for scope in scopes:
        names = [f"{scope}.{name}" for name, _ in module.get_submodule(scope).named_parameters()]
        if held.issuperset(names):
            found += names
    return tuple(found)


def _all_kept(overridable: Sequence[str], scopes: Sequence[str]) -> bool:
    return all(any(name.startswith(f"{scope}.") for name in overridable) for scope in scopes)


def _with_drawn(module: nn.Module, scopes: Sequence[str]) -> nn.Module:
    """A copy whose personal parameters have other values, no two alike."""
    copy = deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for scope in scopes:
            for parameter in copy.get_submodule(scope).parameters():
                parameter.normal_(generator=generator)
    return copy


def _set_values(model: onnx.ModelProto, module: nn.Module, names: Sequence[str]) -> None:
    """Set initialisers to the module's parameters of these names."""
    values = dict(module.named_parameters())
    for initialiser in model.graph.initializer:
        if initialiser.name in names:
            array = values[initialiser.name].detach().numpy()
            initialiser.CopyFrom(onnx.numpy_helper.from_array(array, initialiser.name))


def _export(
    module: nn.Module,
    example: Tensor,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    dynamic: bool,
) -> onnx.ModelProto:
    batch = torch.export.Dim("batch", min=1, max=BATCH_MAX)
    shapes = ({0: batch},) if dynamic else None
    with _quiet(), operators_read_once():
        try:
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=shapes,
            )
        except Exception as err:  # torch.export and onnxscript raise a dozen kinds
            raise ExportError(f"{inputs[0]} to {outputs[0]}: {_first_line(err)}") from err
    assert program is not None  # only the old exporter, without dynamo, returns None
    model: onnx.ModelProto = program.model_proto
    strip(model)
    return model


def _outputs(module: nn.Module, example: Tensor, names: Sequence[str]) -> dict[str, TensorSpec]:
    with torch.no_grad():
        given = module(example)
    tensors = given if isinstance(given, tuple) else (given,)
    return {
        name: TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
        for name, tensor in zip(names, tensors, strict=True)
    }


def _zeros(spec: TensorSpec, batch: int) -> Tensor:
    return torch.zeros((batch, *spec.shape), dtype=getattr(torch, spec.dtype))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's progress and deprecations: dozens of lines about its internals."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
