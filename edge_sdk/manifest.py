"""Manifests: the files of a bundle, their inputs and outputs, the gate; and a server's model.

A bundle is a folder with a manifest and the files that it names. On a server it is named
`{model}/{version}/{variant}`; the variant is `d{depth}` (fp32) or `d{depth}-int8`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast, get_args

import orjson

from edge_sdk.checks import check_value, need
from edge_sdk.errors import ManifestError
from edge_sdk.gate_form import GATE
from profiles.checks import number, one_of

FORMAT: Final = 1
MANIFEST_NAME: Final = "manifest.json"
DTYPES: Final = ("float32", "float16", "uint8", "int8", "int64")
GRAPHS: Final = ("exit", "prefix", "bottleneck", "back")
FREE_FORM_LEVELS: Final = 16

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BUNDLE = re.compile(r"[a-z0-9-]{1,63}/[0-9]{1,9}/d[0-9]{1,3}(-[a-z0-9]{1,20})?")

# of features in training, and of the smashed data of a query
FeatureCodec = Literal["fp32", "fp16", "int8"]
Codec = Literal[
    "fp32",
    "fp16",
    "int8",
    "int8-channel",
    "int4-channel",
    "int8-zstd",
    "int6-zstd",
    "int4-zstd",
    "int4-channel-zstd",
]
FEATURE_CODECS: Final = get_args(FeatureCodec)
CODECS: Final = get_args(Codec)
GatePolicy = str  # a gate as text: edge_sdk.gate_form
T = TypeVar("T")

_need = partial(need, error=ManifestError)
_check = partial(check_value, error=ManifestError)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype (numpy's name) and shape of one sample, without the batch axis."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check("dtype", self.dtype, one_of(DTYPES))
        _check_shape(self.shape)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One ONNX file: batch fixed at 1, named inputs and outputs.

    `overridable` names the initialisers that are graph inputs too: personal weights.
    """

    file: str
    precision: Literal["fp32", "int8"]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    overridable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_file_name(self.file)
        _check("precision", self.precision, one_of(("fp32", "int8")))


@dataclass(frozen=True, slots=True)
class SmashedSpec:
    """The prefix's output: its name on the wire (`z{depth}`), one sample's shape, and the codec
    that keeps the answers, as measured at export.

    Attributes:
        codec: of z, or of the bottleneck's b where the bundle has that graph.
        raw_input: whether the server's answer to the raw input is its answer to z, so that a device
            may send either. Not where device and server have stages 1..d of their own.
    """

    name: str
    shape: tuple[int, ...]
    codec: Codec
    raw_input: bool = False

    def __post_init__(self) -> None:
        _check("codec", self.codec, one_of(CODECS))
        _check_shape(self.shape)


@dataclass(frozen=True, slots=True)
class GatePoint:
    """One point of the operating curve, measured on held-out data.

    threshold: in the gate's unit (nats for entropy).
    exit_rate: share of samples that exit, in [0, 1].
    exit_accuracy, accuracy: of the samples that exit and of all, in [0, 1].
    """

    threshold: float
    exit_rate: float
    exit_accuracy: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class GateSpec:
    """The gate that the bundle was measured with, its threshold and its operating curve.

    Agents of 0.1.0 know single measures alone: they refuse a bundle with a composed gate, and keep
    the one that they have.
    """

    policy: GatePolicy
    threshold: float
    curve: tuple[GatePoint, ...] = ()

    def __post_init__(self) -> None:
        _check("gate policy", self.policy, GATE)
        _check("gate threshold", self.threshold, number())


@dataclass(frozen=True, slots=True)
class BundleManifest:
    """Description of the files that a device runs.

    Attributes:
        bundle: `{model}/{version}/{variant}`.
        input: input of `predict`; the graph does any preprocessing.
        graphs: always `exit` (logits, and `z` if it shares the extractor); `prefix` (z) if it does
            not; `bottleneck` (z to b, which is sent in its place); `back` for methods with the last
            layer on the client.
        golden: a frame file with inputs `x` and the `logits` that the `exit` graph must give.
        parity: differences from the torch model that the export measured, for people.
        run: id of the training run that the weights come from; empty if unknown.
    """

    bundle: str
    backbone: str
    depth: int
    class_names: tuple[str, ...]
    input: TensorSpec
    graphs: dict[str, GraphSpec]
    smashed: SmashedSpec
    gate: GateSpec
    golden: str
    parity: dict[str, Any]
    run: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        _need(self.format == FORMAT, "format", f"{FORMAT} (update splitedge)", self.format)
        check_bundle_name(self.bundle)
        check_file_name(self.golden)
        _need(self.depth >= 1, "depth", "at least 1", self.depth)
        _need(len(self.class_names) >= 2, "class_names", "at least 2", self.class_names)
        known = "exit" in self.graphs and set(self.graphs) <= set(GRAPHS)
        _need(known, "graphs", f"exit and perhaps others of {GRAPHS}", sorted(self.graphs))
        narrow = self.graphs.get("bottleneck")
        ends = narrow is None or (set(narrow.inputs), set(narrow.outputs)) == ({"z"}, {"b"})
        _need(ends, "graphs: bottleneck", "from z to b", narrow)

    @property
    def sent(self) -> tuple[str, tuple[int, ...]]:
        """Name on the wire and shape of what an offload sends: z, or the bottleneck's b."""
        narrow = self.graphs.get("bottleneck")
        if narrow is None:
            return self.smashed.name, self.smashed.shape
        return f"b{self.depth}", narrow.outputs["b"].shape

    @property
    def model(self) -> str:
        """The model's name on the server."""
        return self.bundle.split("/")[0]

    @property
    def version(self) -> str:
        """The model's version on the server."""
        return self.bundle.split("/")[1]

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the bundle except the manifest."""
        return (*(graph.file for graph in self.graphs.values()), self.golden)

    def to_json(self) -> bytes:
        """The manifest as bytes of JSON, as it is on disk."""
        return to_json(self)

    @classmethod
    def from_json(cls, raw: bytes) -> BundleManifest:
        """Read a manifest.

        Raises: ManifestError naming the field, what was expected and what was got.
        """
        return read_json(raw, _bundle_manifest)

    @classmethod
    def load(cls, folder: Path) -> BundleManifest:
        """Read the manifest of the bundle in `folder`.

        Raises: ManifestError, also if there is no manifest.
        """
        return cls.from_json(read_bytes(folder / MANIFEST_NAME))


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """The stages `entry + 1 .. exit` of the super-network in one ONNX file, batch axis dynamic.

    Entry 0 takes the raw input `x`. An `exit` of None is the end of the network: `logits`.
    """

    file: str
    entry: int
    exit: int | None
    input: TensorSpec
    output: TensorSpec

    def __post_init__(self) -> None:
        check_file_name(self.file)
        _need(self.entry >= 0, "segment entry", "at least 0", self.entry)
        follows = self.exit is None or self.exit > self.entry
        _need(follows, "segment exit", f"above {self.entry}", self.exit)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The server's half of a bottleneck: `b{depth}` to `z{depth}` in one file beside the segments.

    Servers of 0.1.0 know none, and refuse queries with `b{depth}`.
    """

    file: str
    depth: int
    input: TensorSpec

    def __post_init__(self) -> None:
        check_file_name(self.file)
        _need(self.depth >= 1, "decoder depth", "at least 1", self.depth)


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """An exported model for the server, as `model.json`:

        {root}/{name}/{version}/model.json
        {root}/{name}/{version}/segments/{file}
        {root}/{name}/{version}/bundles/{variant}/manifest.json and the files it names

    Attributes:
        stages: L. cuts: depths at which the network may be cut, ascending.
        segments: from entry 0 to the end without a gap.
        variants: names of the bundles.
        decoders: of the bottlenecks that bundles have, at most one for each depth.
        cost: profiles.cost.CostTable as JSON.
    """

    name: str
    version: str
    backbone: str
    stages: int
    cuts: tuple[int, ...]
    class_names: tuple[str, ...]
    input: TensorSpec
    segments: tuple[SegmentSpec, ...]
    variants: tuple[str, ...]
    cost: dict[str, Any]
    decoders: tuple[DecoderSpec, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        _need(self.format == FORMAT, "format", f"{FORMAT} (export again)", self.format)
        ends: list[int | None] = [0, *(segment.exit for segment in self.segments)]
        starts: list[int | None] = [*(segment.entry for segment in self.segments), None]
        listed = [(segment.entry, segment.exit) for segment in self.segments]
        _need(ends == starts, "segments", "a chain from 0 to the end", listed)
        _need(len(self.class_names) >= 2, "class_names", "at least 2", self.class_names)
        ascending = list(self.cuts) == sorted({n for n in self.cuts if 1 <= n <= self.stages})
        _need(ascending, "cuts", f"ascending, from 1 to {self.stages}", self.cuts)
        widened = [decoder.depth for decoder in self.decoders]
        fits = len(set(widened)) == len(widened) and set(widened) <= set(self.cuts)
        _need(fits, "decoders", f"one a depth, of {self.cuts}", widened)
        for variant in self.variants:  # all three become folder names
            check_bundle_name(f"{self.name}/{self.version}/{variant}")

    def to_json(self) -> bytes:
        """The manifest as bytes of JSON, as it is on disk."""
        return to_json(self)

    @classmethod
    def from_json(cls, raw: bytes) -> ModelManifest:
        """Read a model manifest.

        Raises: ManifestError naming the field, what was expected and what was got.
        """
        return read_json(raw, _model_manifest)

    @classmethod
    def load(cls, folder: Path) -> ModelManifest:
        """Read the `model.json` in `folder`.

        Raises: ManifestError, also if there is no manifest.
        """
        return cls.from_json(read_bytes(folder / "model.json"))


def check_file_name(name: str) -> str:
    """Return `name` if it is a plain file name that cannot leave its folder.

    Raises: ManifestError.
    """
    _need(bool(_FILE_NAME.fullmatch(name)), "file", "a plain file name", name)
    return name


def check_bundle_name(name: str) -> str:
    """Return `name` if it has the form `{model}/{version}/{variant}`.

    Raises: ManifestError.
    """
    _need(bool(_BUNDLE.fullmatch(name)), "bundle", "MODEL/VERSION/d{DEPTH}[-VARIANT]", name)
    return name


def to_json(manifest: BundleManifest | ModelManifest) -> bytes:
    """Stable, readable JSON of a manifest."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(asdict(manifest), option=options)


def read_json(raw: bytes, build: Callable[[dict[str, Any]], T]) -> T:
    """Parse `raw` as one JSON object and build a record out of it.

    Raises: ManifestError for a member that is missing or of the wrong type.
    """
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as err:
        raise ManifestError(f"manifest is not JSON: {err}") from err
    if not isinstance(data, dict):
        raise ManifestError(f"manifest: expected an object, got {type(data).__name__}")
    try:
        return build(data)
    except KeyError as err:
        raise ManifestError(f"manifest: {err.args[0]!r} is missing") from err
    except (TypeError, ValueError, AttributeError) as err:
        raise ManifestError(f"manifest: {err}") from err


def read_bytes(path: Path) -> bytes:
    """The file's bytes.

    Raises: ManifestError if it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as err:
        raise ManifestError(f"{path}: cannot be read ({err.strerror})") from err


def _check_shape(shape: tuple[int, ...]) -> None:
    fits = len(shape) <= 8 and all(0 < n <= 1 << 24 for n in shape)
    _need(fits, "shape", "at most 8 sizes above 0", shape)


def _text(data: Mapping[str, Any], field: str) -> str:
    value = data[field]
    _need(isinstance(value, str), field, "a string", value)
    return cast("str", value)


def _whole(data: Mapping[str, Any], field: str) -> int:
    value = data[field]
    _need(type(value) is int, field, "a whole number", value)  # True is no number here
    return cast("int", value)


def _number(data: Mapping[str, Any], field: str) -> float:
    value = data[field]
    _need(type(value) in (int, float), field, "a number", value)
    return float(value)


def _object(data: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = data[field]
    _need(isinstance(value, dict), field, "an object", value)
    return cast("dict[str, Any]", value)


def _free_form(data: Mapping[str, Any], field: str) -> dict[str, Any]:
    """An object of any members, but not so deep that writing it would exhaust the stack."""
    value = _object(data, field)
    _need(_within(value, FREE_FORM_LEVELS), field, f"at most {FREE_FORM_LEVELS} levels", value)
    return value


def _within(value: object, levels: int) -> bool:
    items: Iterable[object] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    return levels >= 0 and all(_within(item, levels - 1) for item in items)


def _objects(data: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    value = data[field]
    listed = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    _need(listed, field, "a list of objects", value)
    return cast("list[dict[str, Any]]", value)


def _texts(data: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = data[field]
    listed = isinstance(value, list) and all(isinstance(item, str) for item in value)
    _need(listed, field, "a list of strings", value)
    return tuple(value)


def _wholes(data: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = data[field]
    listed = isinstance(value, list) and all(type(item) is int for item in value)
    _need(listed, field, "a list of whole numbers", value)
    return tuple(value)


def _tensor(data: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(_text(data, "dtype"), _wholes(data, "shape"))


def _tensors(data: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {name: _tensor(_object(data, name)) for name in data}


def _graph(data: Mapping[str, Any]) -> GraphSpec:
    return GraphSpec(
        file=_text(data, "file"),
        precision=cast('Literal["fp32", "int8"]', _text(data, "precision")),
        inputs=_tensors(_object(data, "inputs")),
        outputs=_tensors(_object(data, "outputs")),
        overridable=_texts(data, "overridable"),
    )


def _segment(data: Mapping[str, Any]) -> SegmentSpec:
    return SegmentSpec(
        file=_text(data, "file"),
        entry=_whole(data, "entry"),
        exit=None if data["exit"] is None else _whole(data, "exit"),
        input=_tensor(_object(data, "input")),
        output=_tensor(_object(data, "output")),
    )


def _decoder(data: Mapping[str, Any]) -> DecoderSpec:
    return DecoderSpec(
        file=_text(data, "file"),
        depth=_whole(data, "depth"),
        input=_tensor(_object(data, "input")),
    )


def _gate(data: Mapping[str, Any]) -> GateSpec:
    return GateSpec(
        policy=_text(data, "policy"),
        threshold=_number(data, "threshold"),
        curve=tuple(_gate_point(point) for point in _objects(data, "curve")),
    )


def _gate_point(data: Mapping[str, Any]) -> GatePoint:
    return GatePoint(
        threshold=_number(data, "threshold"),
        exit_rate=_number(data, "exit_rate"),
        exit_accuracy=_number(data, "exit_accuracy"),
        accuracy=_number(data, "accuracy"),
    )


def _smashed(data: Mapping[str, Any]) -> SmashedSpec:
    codec = cast("Codec", _text(data, "codec"))
    return SmashedSpec(
        _text(data, "name"),
        _wholes(data, "shape"),
        codec,
        raw_input=data.get("raw_input", False) is True,  # not of 0.1.0
    )


def _bundle_manifest(data: dict[str, Any]) -> BundleManifest:
    graphs = _object(data, "graphs")
    return BundleManifest(
        format=_whole(data, "format"),
        bundle=_text(data, "bundle"),
        backbone=_text(data, "backbone"),
        depth=_whole(data, "depth"),
        class_names=_texts(data, "class_names"),
        input=_tensor(_object(data, "input")),
        graphs={name: _graph(_object(graphs, name)) for name in graphs},
        smashed=_smashed(_object(data, "smashed")),
        gate=_gate(_object(data, "gate")),
        golden=_text(data, "golden"),
        parity=_free_form(data, "parity"),
        run=_text(data, "run") if "run" in data else "",
    )


def _model_manifest(data: dict[str, Any]) -> ModelManifest:
    return ModelManifest(
        format=_whole(data, "format"),
        name=_text(data, "name"),
        version=_text(data, "version"),
        backbone=_text(data, "backbone"),
        stages=_whole(data, "stages"),
        cuts=_wholes(data, "cuts"),
        class_names=_texts(data, "class_names"),
        input=_tensor(_object(data, "input")),
        segments=tuple(_segment(segment) for segment in _objects(data, "segments")),
        variants=_texts(data, "variants"),
        cost=_free_form(data, "cost"),
        decoders=tuple(_decoder(each) for each in _objects(data, "decoders"))
        if "decoders" in data
        else (),
    )
