"""Personal weights: what a device learnt for itself, used in place of its bundle's weights.

A training saves them as STATE/training/NAME.safetensors (edge_sdk.training.device.kept_weights).
The graphs of a bundle declare which of their weights can be overridden (stages are constants, which
this device writes into the graph as it loads it):

    name in the graph       part of the network       key in the file
    head.…                  the exit head             exit{depth}.…
    extractor.…, head.…     an auxiliary model        auxiliary.…        (BESplit)
    back.…                  the last layer            back.…             (SplitLPF)
    prefix.…, head.…        stages and exit head      answers{depth}.…   (HARMONY, SplitGP)

A device that adapted to its data when training ended (a refit of the last layer, `back.…`, is such
an adaptation), or that has an auxiliary model, keeps under `answers{depth}.…` what it answered with
then, in the form of the graph. That comes first.

The file and the bundle both name the run of the training that they come from. They must agree: an
exit head from one run on the stages of another gives wrong answers. Needs no torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from edge_sdk.bundles.initialisers import with_values
from edge_sdk.bundles.namespaces import AUXILIARY, BACK, answers, exit_head
from edge_sdk.errors import BundleError, ConfigurationError
from edge_sdk.installation import install_command
from edge_sdk.manifest import BundleManifest
from edge_sdk.session import Array

logger = logging.getLogger(__name__)

FOLDER: Final = "training"
ENDING: Final = ".safetensors"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """Personal weights in the form that a bundle's graphs take them.

    Attributes:
        overrides: values of overridable initialisers, by graph, then by name.
        content: of a graph's file, by graph, with this device's constants in it.
    """

    overrides: Mapping[str, Mapping[str, Array]] = field(repr=False)
    content: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class PersonalWeights:
    """The weights that a device kept from one training.

    Attributes:
        training, run: the training's name, and the id of its run.
        tensors: by the keys of the file (edge_sdk.bundles.namespaces).
    """

    training: str
    run: str
    tensors: Mapping[str, Array] = field(repr=False)

    @classmethod
    def load(cls, state: Path, training: str) -> PersonalWeights:
        """Read the weights that a training left in the state folder.

        Raises: ConfigurationError for a training without weights here (naming those that have
            some), a file that cannot be read, or a missing safetensors package.
        """
        try:
            from safetensors import SafetensorError  # noqa: PLC0415 - an extra: [train]
            from safetensors.numpy import load  # noqa: PLC0415
        except ImportError:
            raise ConfigurationError(
                f"personal weights need safetensors; run `{install_command('train')}`"
            ) from None
        folder = state / FOLDER
        path = folder / f"{training}{ENDING}"
        if not NAME.fullmatch(training) or not path.is_file():
            known = ", ".join(sorted(file.stem for file in folder.glob(f"*{ENDING}"))) or "none"
            raise ConfigurationError(
                f"personal weights: expected a training that this device took part in ({known}),"
                f" got {training!r:.100}"
            )
        try:
            raw = path.read_bytes()
            tensors = load(raw)
        except (OSError, SafetensorError) as err:
            raise ConfigurationError(f"{path}: cannot be read ({err}); train again") from err
        return cls(training, run_of(raw), tensors)

    def fitted(self, folder: Path, manifest: BundleManifest) -> FittedWeights:
        """Personal weights in the form that a bundle's graphs take them.

        A device that adapted its stages has constants of the exit graph too, if the graph holds
        them under their names. A graph that does not (attention, int8) keeps its own stages, and
        takes the exit head of the device's last round.

        Args:
            folder: of the bundle.
        Raises: as `overrides`.
        """
        own, exit_graph = answers(manifest.depth), manifest.graphs["exit"]
        adapted = own.select(self.tensors)
        stages = {
            name: value
            for name, value in adapted.items()
            if name not in exit_graph.overridable and not BACK.holds(name)
        }
        if not stages:
            return FittedWeights(self.overrides(manifest))
        self._check_run(manifest)
        self._check_finite({own.key(name): value for name, value in stages.items()})
        try:
            content = with_values(folder / exit_graph.file, stages)
        except BundleError as err:
            logger.warning("bundle=%s keeps its own stages: %s", manifest.bundle, err)
            return FittedWeights(self.overrides(manifest))
        return FittedWeights(self.overrides(manifest, whole=True), {"exit": content})

    def overrides(
        self, manifest: BundleManifest, *, whole: bool = False
    ) -> dict[str, dict[str, Array]]:
        """The values to use in place of a bundle's, by graph, then by name in the graph.

        Args:
            whole: whether the exit graph has the stages that this device adapted.
        Raises: ConfigurationError if they are from another run, if they fit no graph of the bundle,
            or if one is missing or not finite.
        """
        self._check_run(manifest)
        overrides: dict[str, dict[str, Array]] = {}
        for graph, spec in manifest.graphs.items():
            keys = self._keys(graph, spec.overridable, manifest, whole=whole)
            values = {n: self.tensors[key] for n, key in keys.items() if key in self.tensors}
            if not values:
                continue
            missing = sorted(keys.keys() - values.keys())
            if missing:
                raise ConfigurationError(
                    f"personal weights of {self.training}: {missing[0]} of {spec.file} is missing;"
                    " train again"
                )
            self._check_finite({keys[name]: value for name, value in values.items()})
            overrides[graph] = values
        if not overrides:
            raise ConfigurationError(self._misfit(manifest))
        return overrides

    def _keys(
        self, graph: str, names: Sequence[str], manifest: BundleManifest, *, whole: bool
    ) -> dict[str, str]:
        """The key under which this device keeps each of a graph's weights."""
        own = answers(manifest.depth)
        keys = {name: own.key(name) for name in names}
        if graph == BACK.name and self.tensors.keys() & set(keys.values()):
            return keys
        adapted = {own.key(name) for name in own.select(self.tensors) if not BACK.holds(name)}
        # a head that adapted together with stages answers on these alone
        if graph == "exit" and adapted and (whole or adapted <= set(keys.values())):
            return keys
        return {name: _key(name, graph, manifest) for name in names}

    def _check_finite(self, values: Mapping[str, Array]) -> None:
        bad = next((key for key, value in values.items() if not np.isfinite(value).all()), None)
        if bad is not None:
            raise ConfigurationError(
                f"personal weights of {self.training}: {bad} is not finite; train again, or run"
                " without personal weights"
            )

    def _check_run(self, manifest: BundleManifest) -> None:
        if not manifest.run:
            raise ConfigurationError(
                f"{manifest.bundle}: does not name the training run that it was exported from, so"
                f" personal weights of {self.training} may not fit it; export it from the weights"
                " of that training"
            )
        if manifest.run != self.run:
            raise ConfigurationError(
                f"personal weights of {self.training}: are from run {self.run or 'none'}, but"
                f" {manifest.bundle} is from run {manifest.run}; use a bundle that was exported"
                " from that training, or run without personal weights"
            )

    def _misfit(self, manifest: BundleManifest) -> str:
        kept = ", ".join(sorted({key.split(".")[0] for key in self.tensors})) or "nothing"
        keys = (
            _key(name, graph, manifest)
            for graph, spec in manifest.graphs.items()
            for name in spec.overridable
        )
        taken = ", ".join(sorted({key.split(".")[0] for key in keys})) or "none"
        return (
            f"personal weights of {self.training}: are {kept}, but {manifest.bundle} takes {taken};"
            " use a bundle of this device's depth and method"
        )


def run_of(raw: bytes) -> str:
    """The id of the run that weights are from, as their file's header names it; empty without one.

    Args:
        raw: a valid safetensors file.
    """
    header = orjson.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    run: str = header.get("__metadata__", {}).get("run", "")
    return run


def _key(name: str, graph: str, manifest: BundleManifest) -> str:
    """The key under which a device keeps what a graph names `name`."""
    if graph != "exit":
        return name  # the names of `back` start with its namespace already
    if "prefix" in manifest.graphs:  # then the exit graph is an auxiliary model
        return AUXILIARY.key(name)
    return exit_head(manifest.depth).key(name.removeprefix("head."))
