"""The record of a training run: what was trained, on which data, and how it was scored.

A run leaves it next to its weights, and `splitedge export --run` builds the graphs from the two:

    FOLDER/run.json                the record, plain data
    FOLDER/weights.safetensors     the weights (exporters.run.network says under which names)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import orjson

from edge_sdk.checks import check_fields, need
from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import GatePolicy
from edge_sdk.records import added, read_record, table_of
from edge_sdk.training.protocol.client_part import AuxiliaryHead
from exporters.errors import ExportError
from exporters.offloads.settings import OffloadSettings
from profiles.checks import one_of, optional, share, whole

RECORD: Final = "run.json"
WEIGHTS: Final = "weights.safetensors"
FORMAT: Final = 1

Place = Literal["simulation", "devices"]
ScoredPath = Literal["whole", "exit"]


@dataclass(frozen=True, slots=True)
class NetworkRecord:
    """The arguments that `edge_sdk.nets.build` takes.

    Attributes:
        backbone_folder: searched for the module of a user's own network, after the current one.
        bottleneck: depth and channels of a narrowed cut; None for the backbone's own.
    """

    backbone: str
    input_shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int = 0
    norm: str | None = None
    bottleneck: tuple[int, int] | None = None
    backbone_folder: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, "network", classes=whole(2), seed=whole(0))


@dataclass(frozen=True, slots=True)
class DataRecord:
    """The data that the run was tested on.

    Attributes:
        source: word that names the data (edge_sdk.training.data.load).
        folder: searched for the module of a user's own data.
        held_out: share of the training part that no client trained on.
        train_max, test_max: samples used of each part; None for all.
        split: `global` has one test part for all clients; `local` splits each client's own data.
    """

    source: str
    folder: Path | None = None
    held_out: float = 0.0
    train_max: int | None = None
    test_max: int | None = None
    split: Literal["global", "local"] = "global"

    @property
    def chooses(self) -> bool:
        """Whether there are samples that no client trained on and that may choose a threshold."""
        return self.held_out > 0 and self.split == "global"

    def __post_init__(self) -> None:
        some = optional(whole(1))
        check_fields(self, "data", held_out=share, train_max=some, test_max=some)


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """Right answers of the weights as they are deployed, on the test part.

    Attributes:
        path: `whole`, device and server together; `exit`, the device alone.
        depth: stages on the device.
    """

    path: ScoredPath
    depth: int
    samples: int
    right: int

    def __post_init__(self) -> None:
        check_fields(
            self,
            "scores",
            path=one_of(get_args(ScoredPath)),
            depth=whole(1),
            samples=whole(0),
            right=whole(0),
        )


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A finished training run.

    Attributes:
        run: id by which a device knows the personal weights of this run; empty for a simulation.
        place: where the clients were: in a simulation, or devices.
        depths: at which clients were cut, ascending; empty where each had the whole network.
        exits: depths whose exit heads, or auxiliary models, are in the weights.
        auxiliary: form of the head of the clients' auxiliary models, which answer on the device
            (BESplit); None for a method without them.
        own_auxiliary: whether each client has an auxiliary model of its own; else it is averaged.
        own_heads: whether clients have exit heads that they keep to themselves.
        own_server: whether the server trained stages of its own behind every cut (HARMONY).
        own_back: whether the last layer is each client's own (SplitLPF).
        back: whether the weights hold a last layer that all devices can start with.
        own_prefix: whether clients have stages of their own (SplitGP, personalisation).
        gate: measure that the exits were trained for.
        export: what offloads send, as the recipe asks for it.
        scores: of the weights as they are deployed, without personal ones.
    """

    method: str
    rounds: int
    network: NetworkRecord
    class_names: tuple[str, ...]
    data: DataRecord
    place: Place
    depths: tuple[int, ...]
    exits: tuple[int, ...] = ()
    auxiliary: AuxiliaryHead | None = None
    own_auxiliary: bool = field(default=True, metadata=added())
    own_heads: bool = False
    own_server: bool = False
    own_back: bool = False
    back: bool = True
    own_prefix: bool = False
    gate: GatePolicy = "entropy"
    run: str = ""
    scores: tuple[ScoreRecord, ...] = ()
    format: int = FORMAT
    export: OffloadSettings = field(default=OffloadSettings(), metadata=added())

    def __post_init__(self) -> None:
        need(self.format == FORMAT, "format", f"{FORMAT} (update splitedge)", self.format)
        check_fields(self, place=one_of(get_args(Place)), rounds=whole(0))
        names = len(self.class_names)
        need(names == self.network.classes, "class_names", f"{self.network.classes}", names)

    def score(self, path: ScoredPath, depth: int) -> ScoreRecord | None:
        """The score of a path at a depth; None where it was not scored."""
        found = (s for s in self.scores if (s.path, s.depth) == (path, depth))
        return next(found, None)

    def write(self, folder: Path) -> None:
        """Write the record into the run's folder.

        Raises: StorageError.
        """
        table = table_of(self) | {"scores": [table_of(score) for score in self.scores]}
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        write_atomic(folder / RECORD, orjson.dumps(table, default=str, option=options))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> RunRecord:
        """Read a record.

        Raises: ConfigurationError naming what is missing, unknown or wrong.
        """
        table = dict(table)
        listed = table.pop("scores", [])
        need(isinstance(listed, list), "scores", "a list", listed)
        scores = tuple(read_record(ScoreRecord, each, "scores") for each in listed)
        read = read_record(cls, table, "run", unknown="update splitedge")
        return replace(read, scores=scores)


def read_run(folder: Path) -> RunRecord:
    """The record of the run in `folder`.

    Raises: ExportError saying what the folder should hold.
    """
    path = folder / RECORD
    try:
        table = orjson.loads(path.read_bytes())
    except OSError as err:
        raise ExportError(
            f"{folder}: expected the folder of a finished run with {RECORD} and {WEIGHTS}, as"
            " `splitedge simulate --out` names it and `splitedge train` prints it; found no"
            f" {RECORD} ({err.strerror}); a run that was stopped is finished by --resume"
        ) from err
    except orjson.JSONDecodeError as err:
        raise ExportError(f"{path}: expected JSON ({err}); finish the run again") from err
    if not isinstance(table, dict):
        raise ExportError(f"{path}: expected an object, got {type(table).__name__}")
    try:
        return RunRecord.from_dict(table)
    except ConfigurationError as err:
        raise ExportError(f"{path}: {err}") from err
