"""Checks of a server's state: keys, registry, bundles, models, disk, TLS, clock, descriptors.

Nothing is changed, and the server may run meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from edge_sdk.durable import free_bytes
from edge_sdk.errors import BundleError, ConfigurationError, SplitedgeError
from edge_sdk.state import is_held
from server.alerts.limits import AlertLimits
from server.deployment.publisher import digest_of
from server.deployment.unserved import unserved
from server.registry.copies.rows import faults, is_outdated, newest_entry
from server.registry.database import open_registry
from server.registry.location import RegistryLocation, existing_location
from server.registry.migrate import newest_version
from server.registry.operator import OPERATOR_KEY
from server.run import Addresses
from server.signing.artifacts import ArtifactRepository
from server.signing.keys import KeyFolder, is_encrypted
from server.signing.report import problems
from server.state import check_server_state
from server.upkeep.certificate import judge_certificate

Verdict = Literal["ok", "warning", "problem"]

FREE_LOW: Final = 1_000_000_000
FREE_TOO_LOW: Final = 50_000_000
DESCRIPTORS: Final = 4_096
CLOCK_BACK_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check: what was looked at, what was found, and what to do."""

    check: str
    verdict: Verdict
    text: str


def examine(state: Path) -> list[Finding]:
    """Check a server's state; a check that cannot be made is a problem.

    Raises: ConfigurationError if `state` is no server's.
    """
    check_server_state(state)
    checks: dict[str, Callable[[Path], Iterator[Finding]]] = {
        "keys": _keys,
        "registry": _registry,
        "signed bundles": _signed,
        "models": _models,
        "disk": _disk,
        "TLS": _tls,
        "clock": _clock,
        "descriptors": _descriptors,
        "server": _server,
    }
    found = []
    for name, check in checks.items():
        try:
            found += list(check(state))
        except (SplitedgeError, OSError, ValueError) as err:
            found.append(Finding(name, "problem", f"cannot be checked: {err}"))
    return found


def _keys(state: Path) -> Iterator[Finding]:
    secret = [path for path in (state / "keys").iterdir() if path.is_file()]
    file = RegistryLocation.of(state).file
    if file is not None:
        secret.append(file)
    with contextlib.suppress(ConfigurationError):  # the server says so when it starts
        for path in AlertLimits.load(state).open_secrets(state):
            text = f"{path}: other users can read this secret of alerts; run `chmod go= {path}`"
            yield Finding("keys", "problem", text)
    readable = [path for path in (state / "keys", *secret) if path.stat().st_mode & 0o077]
    for path in readable:
        yield Finding(
            "keys",
            "problem",
            f"{path}: other users can read it; run `chmod go= {path}`, and think of new keys",
        )
    if not (state / OPERATOR_KEY).is_file():
        yield Finding("keys", "problem", f"{OPERATOR_KEY} is missing; start the server to make it")
    elif not readable:
        yield Finding("keys", "ok", f"{len(secret)} files, for their owner only")
    root = KeyFolder(state / "keys").path("root")
    if root.exists() and not is_encrypted(root):
        yield Finding(
            "keys",
            "warning",
            f"{root}: the root's key lies on this server unencrypted, and in its backups; move it"
            f" with `splitedge server root move-offline DIR --state {state}`, or stop the server"
            " and encrypt it with `splitedge server root encrypt-keys`",
        )


def _registry(state: Path) -> Iterator[Finding]:
    location = existing_location(state)
    wrong = faults(location)
    for text in wrong:
        yield Finding("registry", "problem", f"{location}: {text}")
    if not wrong:
        outdated = is_outdated(location)
        version = "an earlier version, migrated at the next start" if outdated else newest_version()
        yield Finding("registry", "ok", f"{location}, version {version}")


def _signed(state: Path) -> Iterator[Finding]:
    artifacts = ArtifactRepository(state)
    for text in problems(artifacts):
        expired = "expired" in text or "clock" in text
        yield Finding("signed bundles", "problem" if expired else "warning", text)
    files = artifacts.published()
    damaged = [path for path, digest in files.items() if not _has(path, digest)]
    for path in damaged:
        yield Finding(
            "signed bundles",
            "problem",
            f"{path}: missing or damaged, so devices refuse it; restore it from a backup",
        )
    if not damaged:
        yield Finding("signed bundles", "ok", f"{len(files)} files as signed")


def _models(state: Path) -> Iterator[Finding]:
    if is_outdated(existing_location(state)):  # to open it would migrate it
        yield Finding("models", "warning", "not checked: the registry is of another release")
        return
    with closing(open_registry(state)) as registry:
        versions = registry.catalogue.versions()
        bad_folders = list(unserved(state / "models", registry.catalogue))
    bad = set()
    for one in versions:
        folder = state / "models" / one.name / str(one.version)
        try:
            whole = one.digest in (None, digest_of(folder))
            text = "its files are not those that were published"
        except BundleError as err:
            whole, text = False, str(err)
        if not whole:
            bad.add(folder)
            yield Finding(
                "models",
                "problem",
                f"{one}: {text}; restore them from a backup, or remove it with"
                " `splitedge server models remove`",
            )
    for folder, why in bad_folders:
        if folder not in bad:
            text = f"{folder}: cannot be loaded, so it is not served: {why}; export it again"
            yield Finding("models", "warning", text)
    if not bad:
        yield Finding("models", "ok", f"{len(versions)} published, complete")


def _disk(state: Path) -> Iterator[Finding]:
    free = free_bytes(state)
    text = f"{free / 1e6:,.0f} MB free"
    if free < FREE_TOO_LOW:
        yield Finding("disk", "problem", f"{text}; free some space: soon nothing can be written")
    elif free < FREE_LOW:
        yield Finding("disk", "warning", f"{text}; a model and its backup may need more")
    else:
        yield Finding("disk", "ok", text)


def _tls(state: Path) -> Iterator[Finding]:
    addresses = Addresses.load(state)
    if addresses is None or addresses.tls_cert is None:
        yield Finding("TLS", "ok", "not used at the last start")
        return
    verdict, text = judge_certificate(Path(addresses.tls_cert), addresses.mqtt_public)
    yield Finding("TLS", verdict, text)


def _clock(state: Path) -> Iterator[Finding]:
    newest = newest_entry(existing_location(state))
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
    if newest is not None and newest > now + CLOCK_BACK_S:
        yield Finding(
            "clock",
            "problem",
            f"{shown} UTC, but the registry has a change of {(newest - now) / 3600:,.1f} hours"
            " later: the clock was set back, or was ahead then; set it right",
        )
    else:
        yield Finding("clock", "ok", f"{shown} UTC")


def _descriptors(_state: Path) -> Iterator[Finding]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < DESCRIPTORS:
        yield Finding(
            "descriptors",
            "warning",
            f"at most {most} open files and sockets, enough for about {most // 4} devices; raise"
            " LimitNOFILE of the service, or `ulimit -Hn`",
        )
    else:
        yield Finding("descriptors", "ok", f"at most {most} open files and sockets")


def _server(state: Path) -> Iterator[Finding]:
    yield Finding("server", "ok", "running" if is_held(state, "server") else "not running")


def _has(path: Path, digest: str) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
    except OSError:
        return False
