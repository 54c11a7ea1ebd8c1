"""Enrolment tokens as people carry them: a secret, and the fingerprint of the fleet's TUF root.

The fingerprint lets a device check the root it is given at enrolment, before it trusts it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from edge_sdk.durable import make_folder
from server.registry.artifacts import ArtifactRepository
from server.registry.database import Registry

FINGERPRINT_CHARACTERS: Final = 32


def create_token(
    state: Path, *, fleet: str = "default", ttl_s: float = 3600.0, note: str = ""
) -> str:
    """A new token for the server that keeps its state in `state`, running or not."""
    make_folder(state, mode=0o700)
    artifacts = ArtifactRepository(state)
    artifacts.open_or_create()
    registry = Registry.open(f"sqlite:///{state / 'registry.db'}")
    try:
        secret = registry.create_token(fleet, ttl_s, note)
    finally:
        registry.close()
    root = hashlib.sha256(artifacts.root_bytes).hexdigest()
    return f"{secret}.{root[:FINGERPRINT_CHARACTERS]}"
