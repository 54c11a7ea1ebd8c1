"""Recipes: TOML files that name a method, its numbers, data and training.

method = "supersfl"       # or a function of one's own: see docs/own-method.md

[method_numbers]          # arguments of the method's function; all have defaults
fusion = "tpgf"

[parts]                   # parts taken from other methods; most recipes have none
server = "scala"

[data]
name = "digits"           # or `fashion-mnist=DIR`, a folder of pictures, ...: see docs/data.md
held_out = 0.1            # share that clients do not train on; it chooses thresholds later
partition = "dirichlet"   # and its `numbers`
clients = 10

[train]
backbone = "tiny"
rounds = 30
...
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_type_hints

from edge_sdk.checks import check_fields, check_value, need
from edge_sdk.errors import ConfigurationError
from edge_sdk.gate_form import read_gate
from edge_sdk.installation import names_function, user_function
from edge_sdk.nets import TOKENS, use_network
from edge_sdk.records import added, check_types, inline, read_record, table_of
from edge_sdk.training.data.load import HELD_OUT_SHARE, OF_PICTURES, PUBLISHED, data_word
from edge_sdk.training.data.pictures import holds_pictures
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.update_codec import UpdateCoding
from exporters.offloads.settings import OffloadSettings
from profiles.checks import flag, number, one_of, optional, share, whole
from profiles.energy import PowerModel, declared_power
from profiles.errors import InvalidProfileError
from server.training.methods import (
    besplit,
    fedavg,
    feddyn,
    harmony,
    mergesfl,
    personal,
    pfsl,
    scala,
    splitfed,
    splitlpf,
    supersfl,
)
from server.training.methods.compose import combine, taken_from
from server.training.methods.method import Method
from server.training.recipe.privacy import PrivacySettings, with_noise
from server.training.rounds.round import RoundSettings

# default of `staleness_max` for a recipe with `buffer`
BUFFERED_STALENESS: Final = 10

# the samples that clients are tested on
Split = Literal["global", "local", "own-mix"]

METHODS: Final[Mapping[str, Callable[..., Method]]] = {
    "fedavg": fedavg.fedavg,
    "fedprox": fedavg.fedprox,
    "feddyn": feddyn.feddyn,
    "fedlc": fedavg.fedlc,
    "fedper": personal.fedper,
    "ditto": personal.ditto,
    "splitfed-v1": splitfed.splitfed_v1,
    "splitfed-v2": splitfed.splitfed_v2,
    "minibatch-sfl": splitfed.minibatch,
    "multi-exit": splitfed.multi_exit,
    "splitgp": splitfed.splitgp,
    "harmony": harmony.harmony,
    "scala": scala.scala,
    "mergesfl": mergesfl.mergesfl,
    "pfsl": pfsl.pfsl,
    "splitlpf": splitlpf.splitlpf,
    "supersfl": supersfl.supersfl,
    "besplit": besplit.besplit,
}


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The data set and its partition among the clients.

    Attributes:
        clients: number of simulated clients, or of devices that a training waits for.
        partition: `iid`, `shards`, `dirichlet`, ... (server.training.recipe.partition).
        numbers: arguments of the partition.
        name: word that names the data (edge_sdk.training.data.load): `digits`,
            `fashion-mnist=DIR`, a folder of pictures, ...
        folder: of the data set's files, where `name` does not hold it.
        held_out: share of the samples, apart from the test part, that clients do not train on: they
            choose thresholds and calibrations after training. 0 where nothing is chosen.
        train_max, test_max: samples used; None for all.
        split: `global` tests all clients on samples of the common test set; `own-mix` too, each
            class in the client's own share of it (server.training.recipe.partition.own_mix);
            `local` merges both sets, deals them out and splits them client by client
            (server.training.recipe.partition.local_splits).
        malignant: classes that must not be taken for another; the report then has the share of
            their samples that are (BMR).
    """

    name: str
    clients: int
    partition: str = "iid"
    folder: Path | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    train_max: int | None = None
    test_max: int | None = None
    split: Split = "global"
    malignant: tuple[int, ...] = ()
    held_out: float = HELD_OUT_SHARE

    def __post_init__(self) -> None:
        some = optional(whole(1))
        sets = one_of(get_args(Split))
        check_fields(
            self,
            clients=whole(1),
            train_max=some,
            test_max=some,
            split=sets,
            held_out=number(least=0, below=1),
        )
        for label in self.malignant:
            check_value("malignant", label, whole(0))

    @property
    def word(self) -> str:
        """The data by one word of the grammar, which `splitedge export --data` takes too."""
        return data_word(self.name, self.folder)

    def taken_from(self, data: str) -> DataSettings:
        """The same settings with other data.

        Args:
            data: a word of the grammar; or the folder with the files of this data set, of which
                pictures are none.
        """
        folder, name = Path(data), self.name.partition("=")[0]
        in_folder = name in PUBLISHED or names_function(name) or (folder / name).is_file()
        own_pictures = name not in OF_PICTURES and folder.is_dir() and holds_pictures(folder)
        if folder.is_dir() and in_folder and not own_pictures:
            return replace(self, name=name, folder=folder)
        return replace(self, name=data, folder=None)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Training of clients and server.

    Attributes:
        backbone: a name (edge_sdk.nets), or a network of one's own as `package.module:function`.
        backbone_folder: searched for that module after the current folder; by default the folder
            of the recipe's file.
        rounds: number of rounds.
        start: a .safetensors file of first weights (server.training.run.first_weights), in the
            current folder or in that of the recipe's file.
        training: the numbers that plans carry and the server shares.
        depth: of every client; None lets SuperSFL's Eq. 1 choose by memory and latency, drawn
            uniformly from `memory_gb` and `latency_ms`.
        depths: depths of the clients in turn, in place of `depth`; only in a simulation.
        memory_gb, latency_ms: least and largest value that Eq. 1's draw may give a client.
        decay: factor of learning rates from one round to the next, on both sides
            (server.training.core.server_state.ServerState).
        server_learning_rate: the server's own; None for the clients'.
        server_clip: largest L2 norm of the gradient of one step of the server; None for no limit.
        update: how clients code what they have learnt
            (edge_sdk.training.protocol.update_codec).
    """

    backbone: str
    rounds: int
    training: Training = field(metadata=inline())
    depth: int | None = None
    depths: tuple[int, ...] | None = None
    memory_gb: tuple[float, float] = (2.0, 16.0)
    latency_ms: tuple[float, float] = (20.0, 200.0)
    decay: float = 1.0
    server_learning_rate: float | None = None
    server_clip: float | None = None
    update: UpdateCoding = field(default_factory=UpdateCoding, metadata=inline("update_"))
    backbone_folder: Path | None = None
    start: Path | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            rounds=whole(1),
            depth=optional(whole(1)),
            decay=number(above=0, most=1),
            server_learning_rate=optional(number(above=0)),
            server_clip=optional(number(above=0)),
        )
        if self.depths is not None and (self.depth is not None or not self.depths):
            raise ConfigurationError(
                f"depths: expected one or more, without depth, got {list(self.depths)}"
            )
        for name in ("memory_gb", "latency_ms"):
            value = getattr(self, name)
            if len(value) != 2 or not 0 < value[0] <= value[1]:
                raise ConfigurationError(
                    f"{name}: expected two numbers above 0, the smaller first, got {list(value)}"
                )


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """Evaluation of a run.

    Attributes:
        every: rounds from one measurement of accuracy to the next; the last round is measured too.
        rho: test samples of classes that a client does not train on, as a share of those that it
            does: 0 to 1 (HARMONY tests up to 0.8). 0 tests clients on their own classes alone.
        powers: P_C of the clients in turn, for the modelled latency (HARMONY, Eq. 12), in units in
            which the server's is 100; None for 20 each, which fits the paper's figure of SplitFed.
        local: whether a simulation also scores each client's own networks after the last round, as
            they were before the average; it tests one network a client.
    """

    every: int = 1
    rho: float = 0.0
    local: bool = field(default=False, metadata=added())
    powers: tuple[float, ...] | None = field(default=None, metadata=added())

    def __post_init__(self) -> None:
        check_fields(self, every=whole(1), rho=share, local=flag)
        if self.powers is not None:
            need(bool(self.powers), "powers", "one or more", list(self.powers))
            for power in self.powers:
                check_value("powers", power, number(above=0))


@dataclass(frozen=True, slots=True)
class EnergySettings:
    """Power of the machine of a simulation, for one that measures nothing itself.

    Attributes:
        idle_w, busy_w: watts at rest and with all cores busy; None for unknown.
        co2_g_kwh: grams of CO2 that the grid emits for a kilowatt hour; None for unknown.
    """

    idle_w: float | None = None
    busy_w: float | None = None
    co2_g_kwh: float | None = field(default=None, metadata=added())

    def __post_init__(self) -> None:
        check_fields(self, co2_g_kwh=optional(number(least=0)))
        try:
            self.model()
        except InvalidProfileError as err:
            raise ConfigurationError(str(err)) from err

    def model(self) -> PowerModel | None:
        """The power model; None for a recipe without watts."""
        return declared_power(self.idle_w, self.busy_w, "the recipe")


@dataclass(frozen=True)  # without slots: `built_method` is kept in the instance
class Recipe:
    """A whole recipe, checked.

    Attributes:
        method: name of the method: supersfl, besplit, scala, harmony, splitlpf or a baseline; or a
            function of one's own that returns a Method, as `package.module:function`.
        method_numbers: arguments of the method's function.
        parts: by part, the other method that it is taken from (server.training.methods.compose):
            its name, or a table of `method` and `numbers`.
        method_folder: searched for that module after the current folder; by default the folder of
            the recipe's file.
        export: what the offloads of the exported model send; it changes nothing in the training.
        gate: what exits are judged by, as text (edge_sdk.gate_form); None for the method's measure.
            An export fits scales that it leaves open.
        seed: of every random stream; the same seed gives the same weights on one machine.
    """

    method: str
    data: DataSettings
    train: TrainSettings
    round: RoundSettings = field(default_factory=RoundSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    energy: EnergySettings = field(default_factory=EnergySettings)
    export: OffloadSettings = field(default=OffloadSettings(), metadata=added())
    method_numbers: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    gate: str | None = None
    seed: int = 0
    method_folder: Path | None = field(default=None, metadata=added())

    def __post_init__(self) -> None:
        check_fields(self, seed=whole(0))
        if self.gate is not None:
            read_gate(self.gate)
        if self.evaluate.local and self.round.buffer is not None:
            raise ConfigurationError(
                "evaluate: local: expected false with round.buffer, where some clients are at work"
                " while others merge"
            )
        codec = self.train.update.codec
        if self.round.staleness_max and codec != "fp32":
            raise ConfigurationError(
                f"update_codec: {codec} codes the change since the start of a round, which a late"
                " update no longer finds: expected fp32, or staleness_max = 0"
            )

    def to_dict(self) -> dict[str, Any]:
        """The recipe as TOML has it, defaults filled in."""
        return _with_text_paths(table_of(self))

    @cached_property
    def built_method(self) -> Method:
        """The method with this recipe's numbers and parts, built once.

        Raises: ConfigurationError naming what is wrong and what is known.
        """
        folder = self.method_folder
        method = _method(self.method, self.method_numbers, "method_numbers", folder)
        if self.parts:
            parts = {name: _part(name, source, folder) for name, source in self.parts.items()}
            method = combine(method, parts)
        return with_noise(replace(method, judged_by=self.gate), self.privacy.noise())


def _factory(name: str, folder: Path | None) -> Callable[..., Method]:
    """The function that builds a method: one of METHODS, or the user's own.

    Args:
        folder: searched for a user's module after the current one.
    Raises: ConfigurationError if there is none of that name.
    """
    if name in METHODS:
        return METHODS[name]
    if names_function(name):
        folders = () if folder is None else (Path.cwd(), folder)
        return user_function(name, folders, what="method")
    raise ConfigurationError(
        f"method {name!r}: expected one of {', '.join(METHODS)}, or your own as"
        " package.module:function"
    )


@cache
def _types(factory: Callable[..., Method]) -> Mapping[str, Any]:
    """Types of a method's numbers; to look them up takes longer than all else of a recipe."""
    return get_type_hints(factory)


def _method(name: str, numbers: object, where: str, folder: Path | None) -> Method:
    factory = _factory(name, folder)
    if not isinstance(numbers, Mapping):
        raise ConfigurationError(f"{where}: expected a table, got {numbers!r}")
    parameters = inspect.signature(factory).parameters
    known = list(parameters)
    unknown = sorted(set(numbers) - set(known))
    if unknown:
        takes = ", ".join(known) or "none"
        raise ConfigurationError(f"{where}: {name} takes {takes}; got {', '.join(unknown)}")
    lacking = [key for key, each in parameters.items() if each.default is each.empty]
    if missing := [key for key in lacking if key not in numbers]:
        raise ConfigurationError(
            f"{where}: {name} needs {', '.join(missing)}; give a value, or give the function a"
            " default"
        )
    try:
        check_types(numbers, _types(factory))
        method = factory(**numbers)
    except ConfigurationError as err:
        raise ConfigurationError(f"{where}: {err}") from err
    if not isinstance(method, Method):
        raise ConfigurationError(
            f"method {name!r}: expected the function to return a Method"
            f" (server.training.methods.method), got {type(method).__name__}"
        )
    return method


def _part(name: str, source: object, folder: Path | None) -> Method:
    """The method that one part is taken from."""
    where = f"parts.{name}"
    if isinstance(source, str):
        return _method(source, {}, where, folder)
    keys = set(source) if isinstance(source, Mapping) else set()
    if not isinstance(source, Mapping) or not {"method"} <= keys <= {"method", "numbers"}:
        raise ConfigurationError(
            f"{where}: expected a method's name, or a table of method and numbers, got {source!r}"
        )
    numbers = source.get("numbers", {})
    method = _method(source["method"], numbers, f"{where}.numbers", folder)
    factory = _factory(source["method"], folder)
    unused = next(_unused_numbers(name, factory, numbers), None)
    if unused is not None:
        raise ConfigurationError(
            f"{where}.numbers: {unused} has no effect on the {name} part of {method.name}: leave it"
            " out, or take the part that it belongs to"
        )
    return method


def _unused_numbers(
    part: str, factory: Callable[..., Method], numbers: Mapping[str, Any]
) -> Iterator[str]:
    """Names of numbers that differ from their defaults and have no effect on a part.

    None for a part with functions: two of them differ even when built from the same numbers.
    """

    def taken(given: Mapping[str, Any]) -> list[Any]:
        return list(taken_from(part, factory(**given)).values())

    all_numbers = taken(numbers)
    if any(map(callable, all_numbers)):
        return
    defaults = inspect.signature(factory).parameters
    for name, value in numbers.items():
        others = {other: numbers[other] for other in numbers if other != name}
        if value != defaults[name].default and taken(others) == all_numbers:
            yield name


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises: ConfigurationError naming the file, the key and what was expected.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as err:
        raise ConfigurationError(f"{path}: cannot be read ({err.strerror})") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigurationError(f"{path}: not TOML ({err})") from err
    try:
        return read_recipe(_with_places(data, path.resolve().parent))
    except ConfigurationError as err:
        raise ConfigurationError(f"{path}: {err}") from err


def _with_places(data: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The tables with the places of the user's own files, some of which are next to the recipe."""
    if _names_own_method(data):
        data = {"method_folder": str(folder), **data}
    train = data.get("train")
    if not isinstance(train, Mapping):
        return data
    train = dict(train)
    if names_function(str(train.get("backbone"))):
        train.setdefault("backbone_folder", str(folder))
    start = train.get("start")
    if isinstance(start, str) and not Path(start).is_file() and (folder / start).is_file():
        train["start"] = str(folder / start)
    return {**data, "train": train}


def _names_own_method(data: Mapping[str, Any]) -> bool:
    """Whether the method, or that of a part, is a function of the user's own."""
    parts = data.get("parts")
    sources = list(parts.values()) if isinstance(parts, Mapping) else []
    named = [each.get("method") if isinstance(each, Mapping) else each for each in sources]
    return any(names_function(str(each)) for each in (data.get("method"), *named))


def _with_text_paths(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table and those within it, with each path as text."""
    return {
        key: _with_text_paths(value)
        if isinstance(value, Mapping)
        else str(value)
        if isinstance(value, Path)
        else value
        for key, value in table.items()
    }


def read_recipe(data: Mapping[str, Any]) -> Recipe:
    """Build a recipe from tables as TOML has them, and check it.

    The modules of a backbone and of a method of one's own are imported: read recipes of this
    machine only.

    Raises: ConfigurationError naming the table, the key and what was expected.
    """
    recipe = read_record(Recipe, _with_staleness(data), "recipe")
    method, backbone = recipe.built_method, recipe.train.backbone
    folder = recipe.train.backbone_folder
    use_network(backbone, () if folder is None else (Path.cwd(), folder))
    distil = method.client.distil
    if distil is not None and distil.head == "global" and backbone in TOKENS:
        raise ConfigurationError(
            f"train: {backbone}'s features are tokens, not maps that can be pooled: expected"
            ' auxiliary_head = "exit", or another backbone'
        )
    if method.client.frozen and recipe.train.start is None:
        raise ConfigurationError(
            f"train: {method.name} keeps the fronts as the server sends them, and without start"
            " they are random: expected start, a .safetensors file of pre-trained weights, or"
            " fronts that train (freeze_front = false)"
        )
    if method.client.own_head and recipe.train.update.codec == "synthetic":
        raise ConfigurationError(
            "train: update codec synthetic replays the whole network's gradient, and the last layer"
            f" of {method.name} stays on its clients: expected another codec"
        )
    if method.client.shared_auxiliary and recipe.train.update.codec == "synthetic":
        raise ConfigurationError(
            "train: update codec synthetic carries the change of the stages, not of an averaged"
            ' auxiliary model: expected another codec, or auxiliary = "personal"'
        )
    if method.batch_share is not None and recipe.train.training.iterations is None:
        raise ConfigurationError(
            f"train: {method.name} shares each batch out among the participants, so its rounds are"
            " counted in batches: expected iterations"
        )
    return recipe


def _with_staleness(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables with a default of `staleness_max` that fits buffered rounds.

    They merge while clients are at work, so 0 would refuse all updates after a merge.
    """
    rounds = data.get("round")
    if not isinstance(rounds, Mapping) or "buffer" not in rounds:
        return data
    return {**data, "round": {"staleness_max": BUFFERED_STALENESS, **rounds}}
