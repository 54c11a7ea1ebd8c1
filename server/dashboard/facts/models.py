"""Facts of the models page: versions, who runs them, and the operating curves of their bundles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from edge_sdk.errors import SplitedgeError
from edge_sdk.manifest import MANIFEST_NAME, BundleManifest, GatePoint
from server.deployment.overview import VersionState, version_states
from server.registry.database import Registry
from server.registry.records import FleetModel


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """One bundle of a version.

    Attributes:
        name: `MODEL/VERSION/VARIANT`.
        size_bytes: of all its files, which a device downloads.
        gate: measure by which it decides. threshold: in the gate's unit.
        curve: measured on held-out data at export.
    """

    name: str
    variant: str
    depth: int
    precision: str
    size_bytes: int
    codec: str
    gate: str
    threshold: float
    curve: tuple[GatePoint, ...]
    parity: dict[str, Any]


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """One published version, and its bundles; none if its files are gone or cannot be read."""

    state: VersionState
    bundles: tuple[BundleFacts, ...]
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """All versions, newest first within a name, and the model of each fleet."""

    versions: list[VersionFacts]
    fleets: list[FleetModel]


def model_facts(registry: Registry, models: Path) -> ModelFacts:
    """The facts of every published model.

    Args:
        models: folder of the exports.
    """
    states = sorted(version_states(registry), key=lambda one: (one.model, -one.version))
    versions = []
    for state in states:
        manifests = bundles_in(models / state.model / str(state.version))
        names = manifests[0][0].class_names if manifests else ()
        facts = tuple(_bundle(manifest, size) for manifest, size in manifests)
        versions.append(VersionFacts(state, facts, names))
    return ModelFacts(versions, list(registry.catalogue.fleets()))


def bundle_facts(models: Path, name: str | None) -> BundleFacts | None:
    """The facts of one bundle `MODEL/VERSION/VARIANT`; None if it is not there."""
    found = _find(models, name)
    return None if found is None else _bundle(*found)


def bundle_manifest(models: Path, name: str) -> BundleManifest | None:
    """The manifest of one bundle `MODEL/VERSION/VARIANT`; None if it is not there."""
    found = _find(models, name)
    return None if found is None else found[0]


def bundles_in(version: Path) -> list[tuple[BundleManifest, int]]:
    """Manifest and size in bytes of each bundle in a version's folder, shallow ones first."""
    folders = sorted(path.parent for path in (version / "bundles").glob(f"*/{MANIFEST_NAME}"))
    found = [each for each in map(_load, folders) if each is not None]
    return sorted(found, key=lambda each: (each[0].depth, each[0].bundle))


def _find(models: Path, name: str | None) -> tuple[BundleManifest, int] | None:
    if name is None or name.count("/") != 2:
        return None
    model, version, variant = name.split("/")
    return _load(models / model / version / "bundles" / variant)


def _load(folder: Path) -> tuple[BundleManifest, int] | None:
    try:
        return _load_once(folder, (folder / MANIFEST_NAME).stat().st_mtime_ns)
    except (OSError, SplitedgeError):  # removed meanwhile, or damaged: `models list` says which
        return None


@lru_cache(maxsize=512)
def _load_once(folder: Path, _changed_at: int) -> tuple[BundleManifest, int]:
    manifest = BundleManifest.load(folder)
    names = (*manifest.files, MANIFEST_NAME)
    return manifest, sum((folder / name).stat().st_size for name in names)


def _bundle(manifest: BundleManifest, size_bytes: int) -> BundleFacts:
    return BundleFacts(
        name=manifest.bundle,
        variant=manifest.bundle.rpartition("/")[2],
        depth=manifest.depth,
        precision=manifest.graphs["exit"].precision,
        size_bytes=size_bytes,
        codec=manifest.smashed.codec,
        gate=manifest.gate.policy,
        threshold=manifest.gate.threshold,
        curve=manifest.gate.curve,
        parity=manifest.parity,
    )
