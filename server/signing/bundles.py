"""Bundles of an export, as the targets of signed metadata."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tuf.api.metadata import TargetFile

from edge_sdk.errors import ManifestError
from edge_sdk.manifest import MANIFEST_NAME, BundleManifest, ModelManifest, read_bytes


@dataclass(frozen=True, slots=True)
class SignedBundle:
    """One bundle of an export: its files, and the targets to sign.

    Attributes:
        name: `{model}/{version}/{variant}`.
        files: bytes by their name in the bundle.
    """

    name: str
    files: dict[str, bytes]
    targets: tuple[TargetFile, ...]


def read_bundle(model: ModelManifest, folder: Path, variant: str) -> SignedBundle:
    """The bundle of a variant in an export.

    Raises: ManifestError for files that are missing, or of another bundle.
    """
    raw = read_bytes(folder / MANIFEST_NAME)
    manifest = BundleManifest.from_json(raw)
    expected = f"{model.name}/{model.version}/{variant}"
    if manifest.bundle != expected:
        raise ManifestError(
            f"{folder}: expected the bundle {expected}, its manifest says {manifest.bundle}; "
            "export again"
        )
    files = {name: read_bytes(folder / name) for name in manifest.files}
    files[MANIFEST_NAME] = raw
    targets = tuple(_target(manifest, name, data) for name, data in files.items())
    return SignedBundle(manifest.bundle, files, targets)


def _target(manifest: BundleManifest, name: str, data: bytes) -> TargetFile:
    """The target of a file; the manifest's own also lists, signed, all files of the bundle."""
    path = f"bundles/{manifest.bundle}/{name}"
    target = TargetFile(len(data), {"sha256": hashlib.sha256(data).hexdigest()}, path)
    if name == MANIFEST_NAME:
        target.unrecognized_fields["custom"] = {"files": list(manifest.files)}
    return target
