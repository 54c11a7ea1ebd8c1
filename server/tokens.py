"""Enrolment tokens of a server, whether it runs or not."""

from __future__ import annotations

import getpass
from pathlib import Path

from edge_sdk.durable import make_folder
from server.registry.credentials import token_text
from server.registry.database import open_registry
from server.registry.location import RegistryLocation, settle
from server.registry.transactions import acting_from
from server.signing.artifacts import ArtifactRepository


def create_token(
    state: Path, *, fleet: str | None = None, note: str = "", approve: bool = False
) -> str:
    """Make one token of an hour, as `create_tokens`."""
    return create_tokens(state, fleet=fleet, note=note, approve=approve)[0]


def create_tokens(
    state: Path,
    count: int = 1,
    *,
    fleet: str | None = None,
    ttl_s: float = 3600.0,
    note: str = "",
    location: RegistryLocation | None = None,
    approve: bool = False,
    device: str | None = None,
    passphrase: bytes | None = None,
) -> list[str]:
    """Make tokens for the server with this state folder.

    Args:
        fleet, device: as `Registry.create_tokens` takes them.
        location: the registry of a new server, if it is not a file in the state folder.
        passphrase: of the server's keys, which are made where no server has run yet.
    Raises: ClockError while the clock is wrong: the tokens would outlive their time, or not live;
        BadRequestError; UnknownDeviceError.
    """
    make_folder(state, mode=0o700)
    location = settle(state, location)
    location.save(state)
    artifacts = ArtifactRepository(state, passphrase=passphrase)
    if artifacts.roots.newest_version == 0:
        artifacts.open_or_create()
    root = artifacts.root_for_enrolment()
    registry = open_registry(state, location)
    try:
        with acting_from(f"{getpass.getuser()} on this machine"):
            made = registry.create_tokens(count, fleet, ttl_s, note, approve=approve, device=device)
            return [token_text(secret, root) for secret in made]
    finally:
        registry.close()
