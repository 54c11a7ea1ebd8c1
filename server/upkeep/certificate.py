"""Checks of the server's TLS certificate: its dates, and the names by which devices reach it."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from server.listening.certificate import first_certificate
from server.routes.host_names import certificate_names

WARN_BEFORE: Final = timedelta(days=30)


def judge_certificate(
    path: Path, mqtt_public: str | None, now: datetime | None = None
) -> tuple[Literal["ok", "warning", "problem"], str]:
    """Whether devices take a certificate, today and in a month, and what to do if not.

    Args:
        path: PEM file.
        mqtt_public: URL of the broker as devices are told; None for the server's own host.
        now: None for the time by this machine's clock.
    Raises: OSError, ValueError if the file cannot be read.
    """
    first = first_certificate(path)
    at = datetime.now(UTC) if now is None else now
    ends, begins = first.not_valid_after_utc, first.not_valid_before_utc
    if not begins <= at <= ends:
        when = f"expired on {ends:%Y-%m-%d}" if at > ends else f"is valid from {begins:%Y-%m-%d} on"
        return "problem", f"{path}: {when}, so devices refuse it; renew it and restart the server"
    names = certificate_names(path)
    named = ", ".join(sorted(names)) or "no host"
    host = _host(mqtt_public)
    if host is not None and host not in names:
        return "problem", (
            f"{path}: it names {named}, and devices are told to connect to {host}; make one that"
            " names it too"
        )
    if ends - at < WARN_BEFORE:
        left = (ends - at).days
        return "warning", f"{path}: expires on {ends:%Y-%m-%d}, in {left} days; renew it"
    return "ok", f"valid until {ends:%Y-%m-%d}, for {named}"


def _host(url: str | None) -> str | None:
    """The host of a URL; None for an address that stands for the server's own host."""
    host = None if url is None else urlsplit(url).hostname
    try:
        return None if host is None or ipaddress.ip_address(host).is_unspecified else host
    except ValueError:
        return host
