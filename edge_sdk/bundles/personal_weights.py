"""What this device learnt for itself, to answer with in place of what its bundle holds.

A training leaves STATE/training/NAME.safetensors (edge_sdk.training.device.kept_weights). The
graphs of a bundle say which of their weights may be another's:

    head.…                  the exit head             exit{depth}.… of the file
    extractor.…, head.…     an exit of its own        auxiliary.…        (BESplit)
    back.…                  the last layer            back.…             (SplitLPF)

Both say which run of a training they come from: one run's head over another's stages would answer,
and wrongly. No torch is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import BundleManifest
from edge_sdk.session import Array

FOLDER: Final = "training"
ENDING: Final = ".safetensors"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """What a device kept of one training, by the names under which it did.

    Attributes:
        training, run: the training's name, and which run of it.
    """

    training: str
    run: str
    tensors: Mapping[str, Array] = field(repr=False)

    @classmethod
    def load(cls, state: Path, training: str) -> OwnWeights:
        """Read what is kept in the state folder.

        Raises: ConfigurationError saying what there is, or what is wrong with it.
        """
        try:
            from safetensors import SafetensorError  # noqa: PLC0415 - of those who train alone
            from safetensors.numpy import load  # noqa: PLC0415
        except ImportError:
            raise ConfigurationError(
                "own weights: need safetensors; run `pip install 'splitedge[train]'`"
            ) from None
        folder = state / FOLDER
        path = folder / f"{training}{ENDING}"
        if not NAME.fullmatch(training) or not path.is_file():
            there = ", ".join(sorted(each.stem for each in folder.glob(f"*{ENDING}"))) or "none"
            raise ConfigurationError(
                f"own weights: expected a training this device took part in, {there}; got"
                f" {training!r:.100}"
            )
        try:
            raw = path.read_bytes()
            tensors = load(raw)
        except (OSError, SafetensorError) as err:
            raise ConfigurationError(f"{path}: cannot be read ({err}); train again") from err
        return cls(training, run_of(raw), tensors)

    def overrides(self, manifest: BundleManifest) -> dict[str, dict[str, Array]]:
        """What to put in place of a bundle's own, by graph and by the graph's names.

        Raises: ConfigurationError where they are of another run, where the bundle has no place
            for them, and for weights that are not finite.
        """
        self._check_run(manifest)
        found: dict[str, dict[str, Array]] = {}
        for graph, spec in manifest.graphs.items():
            names = {name: _kept_as(name, graph, manifest) for name in spec.overridable}
            there = {n: self.tensors[kept] for n, kept in names.items() if kept in self.tensors}
            if not there:
                continue
            lacking = sorted(names.keys() - there.keys())
            if lacking:
                raise ConfigurationError(
                    f"own weights of {self.training}: lack {lacking[0]} of {spec.file}; train again"
                )
            bad = next((n for n, value in there.items() if not np.isfinite(value).all()), None)
            if bad is not None:
                raise ConfigurationError(
                    f"own weights of {self.training}: {names[bad]} is not finite; train again, or"
                    " answer with the bundle's own"
                )
            found[graph] = there
        if not found:
            kept = ", ".join(sorted({name.split(".")[0] for name in self.tensors})) or "nothing"
            places = sorted(
                {
                    _kept_as(name, graph, manifest).split(".")[0]
                    for graph, spec in manifest.graphs.items()
                    for name in spec.overridable
                }
            )
            raise ConfigurationError(
                f"own weights of {self.training}: are {kept}, {manifest.bundle} has a place for"
                f" {', '.join(places) or 'none'}; run a bundle of this device's depth and method"
            )
        return found

    def _check_run(self, manifest: BundleManifest) -> None:
        if not manifest.run:
            raise ConfigurationError(
                f"{manifest.bundle}: does not say which training it is of, so nobody knows whether"
                f" own weights of {self.training} fit it; export it from that training's weights"
            )
        if manifest.run != self.run:
            raise ConfigurationError(
                f"own weights of {self.training}: are of run {self.run or 'none'},"
                f" {manifest.bundle} is of run {manifest.run}; run a bundle that is exported from"
                " that training, or answer with the bundle's own"
            )


def run_of(raw: bytes) -> str:
    """Which run of a training weights are of, by the header of their file; empty if it is not said.

    Args:
        raw: a safetensors file that was read without fault.
    """
    header = orjson.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    run: str = header.get("__metadata__", {}).get("run", "")
    return run


def _kept_as(name: str, graph: str, manifest: BundleManifest) -> str:
    """Under which name a device keeps what a graph has as `name`."""
    if graph != "exit":
        return name
    if "prefix" in manifest.graphs:  # then the exit has an extractor of its own
        return f"auxiliary.{name}"
    return f"exit{manifest.depth}.{name.removeprefix('head.')}"
