"""State of signing: which keys, until when, and what someone has to act on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from tuf.api.metadata import Root, Snapshot, Targets, Timestamp

from server.errors import ArtifactError
from server.signing.artifacts import ArtifactRepository
from server.signing.clock import Clock, utc_now
from server.signing.keys import ONLINE, ROLES, is_encrypted

logger = logging.getLogger(__name__)

# The root needs a command. The others are signed again 30 days before they end, the timestamp each
# hour: that they are closer to their end says that signing fails.
WARN_BEFORE: Final = {
    Root.type: timedelta(days=30),
    Targets.type: timedelta(days=29),
    Snapshot.type: timedelta(days=29),
    Timestamp.type: timedelta(days=3),
}
WARN_EVERY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class RoleReport:
    """A role: its keys by the start of their ids, how many must sign, and the end of its metadata.

    Attributes:
        keys_in_state: how many of its private keys lie in the state folder.
        encrypted: whether all of these are encrypted.
    """

    role: str
    keys: tuple[str, ...]
    threshold: int
    keys_in_state: int
    encrypted: bool
    expires: datetime | None


@dataclass(frozen=True, slots=True)
class SigningReport:
    """The state of signing.

    Attributes:
        root_version: 0 where nothing has been signed yet.
        problems: what someone has to act on, in sentences.
    """

    signs: bool
    root_version: int
    last_signed: datetime | None
    roles: tuple[RoleReport, ...]
    problems: tuple[str, ...]


def signing_report(artifacts: ArtifactRepository) -> SigningReport:
    """Read what signs; it needs no passphrase and changes nothing.

    Raises: ArtifactError if the root or the metadata are damaged.
    """
    version = artifacts.roots.newest_version
    clock = artifacts.clock_problem
    roles: tuple[RoleReport, ...] = ()
    if version:
        roles = tuple(_roles(artifacts))
    return SigningReport(
        signs=clock is None and version > 0,
        root_version=version,
        last_signed=artifacts.last_signed,
        roles=roles,
        problems=tuple(problems(artifacts)),
    )


def problems(artifacts: ArtifactRepository) -> list[str]:
    """Sentences on what someone has to act on: a wrong clock, and what expires soon.

    Raises: ArtifactError if the root or the metadata are damaged.
    """
    clock = artifacts.clock_problem
    found = [] if clock is None else [clock]
    if artifacts.roots.newest_version == 0:
        return found or ["nothing is signed yet; start the server"]
    if clock is None:
        found += _expiring(artifacts)
    clear = artifacts.keys.in_the_clear()
    if artifacts.keys.passphrase is not None and clear:
        found.append(
            f"{', '.join(path.name for path in clear)}: not encrypted, although there is a"
            " passphrase; stop the server and run `splitedge server root encrypt-keys`"
        )
    return found


class ExpiryWarnings:
    """Logs what expires soon, once a day.

    Args:
        clock: the time by which a day passes.
    """

    def __init__(self, clock: Clock = utc_now) -> None:
        self._clock = clock
        self._logged: dict[str, datetime] = {}

    def log(self, artifacts: ArtifactRepository) -> None:
        """Warn of what was not warned of within a day.

        Raises: ArtifactError.
        """
        now = self._clock()
        for line in problems(artifacts):
            before = self._logged.get(line)
            # a clock that was set back must not silence it
            if before is None or not before <= now < before + WARN_EVERY:
                logger.warning("signing: %s", line)
                self._logged[line] = now
        self._logged = {line: at for line, at in self._logged.items() if at + WARN_EVERY > now}


def _expiring(artifacts: ArtifactRepository) -> list[str]:
    now = artifacts.now
    found = []
    for role, end in _expiries(artifacts).items():
        if now < end - WARN_BEFORE[role]:
            continue
        when = f"expired on {end:%Y-%m-%d}" if now >= end else f"expires on {end:%Y-%m-%d}"
        todo = (
            "devices then take no update and none can enrol; run `splitedge server root renew`"
            if role == Root.type
            else "the server signs it again by itself, but could not; its log says why"
        )
        found.append(f"the {role} {when}: {todo}")
    return found


def _roles(artifacts: ArtifactRepository) -> list[RoleReport]:
    root = artifacts.roots.newest().signed
    ends = _expiries(artifacts)
    found = []
    for role in ROLES:
        named = root.roles[role]
        path = artifacts.keys.path(role)
        there = path.exists()
        found.append(
            RoleReport(
                role=role,
                keys=tuple(keyid[:8] for keyid in named.keyids),
                threshold=named.threshold,
                keys_in_state=int(there),
                encrypted=there and is_encrypted(path),
                expires=ends.get(role),
            )
        )
    return found


def _expiries(artifacts: ArtifactRepository) -> dict[str, datetime]:
    """The end dates that are known: a copy of the roots alone has no others."""
    try:
        return artifacts.expiries()
    except ArtifactError:
        if any((artifacts.metadata_folder / f"{role}.json").exists() for role in ONLINE):
            raise
        return {Root.type: artifacts.roots.newest().signed.expires}
