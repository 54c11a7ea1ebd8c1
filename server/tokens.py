"""Enrolment tokens of a server, whether it runs or not."""

from __future__ import annotations

from pathlib import Path

from edge_sdk.durable import make_folder
from server.registry.artifacts import ArtifactRepository
from server.registry.credentials import token_text
from server.registry.database import open_registry


def create_token(
    state: Path, *, fleet: str = "default", ttl_s: float = 3600.0, note: str = ""
) -> str:
    """Make a token for the server with this state folder."""
    make_folder(state, mode=0o700)
    artifacts = ArtifactRepository(state)
    artifacts.open_or_create()
    registry = open_registry(state)
    try:
        return token_text(registry.create_token(fleet, ttl_s, note), artifacts.root_bytes)
    finally:
        registry.close()
