"""Sign-in links, as a person opens them in a browser, and the address that they begin with.

STATE/dashboard.url    of the server that runs there, or ran last
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from edge_sdk.durable import write_atomic
from edge_sdk.errors import StorageError
from edge_sdk.wire.address import is_loopback
from server.errors import RegistryError
from server.registry.database import Registry
from server.routes.host_names import certificate_names

logger = logging.getLogger(__name__)

URL_NAME: Final = "dashboard.url"


def first_link(state: Path, registry: Registry, page: str) -> str | None:
    """A link to a dashboard that has just started; its address is kept for `dashboard-link`.

    Returns: None on a full disk, which stops no server.
    """
    try:
        keep_page_url(state, page)
        return sign_in_url(page, registry.sign_ins.new_link())
    except (RegistryError, StorageError) as err:
        logger.warning("no sign-in link to the dashboard: %s", err)
        return None


def keep_page_url(state: Path, page: str) -> None:
    """Keep the address for `dashboard-link`.

    Raises: StorageError.
    """
    if read_page_url(state) != page:
        write_atomic(state / URL_NAME, page.encode("ascii"))


def read_page_url(state: Path) -> str | None:
    """The address of the dashboard of the server with this state folder; None without one."""
    try:
        return (state / URL_NAME).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None


def page_url(api: str, certificate: Path | None = None, names: Iterable[str] = ()) -> str:
    """The address of the dashboard of the server that listens at `api`, as people reach it.

    A server on loopback that was given a name has a proxy in front of it, which speaks HTTPS at the
    usual port. One that listens on all addresses is reached by its certificate's name or address,
    else by this machine's name.

    Args:
        names: those given with `--host-name`.
    """
    parts = urlsplit(api)
    host, given = parts.hostname or "", [_ascii(one) for one in names if not one.startswith("*")]
    if is_loopback(host):
        return f"https://{_in_url(given[0])}/" if given else f"{api}/"
    if not _is_unspecified(host):
        return f"{api}/"
    own = [] if certificate is None else sorted(certificate_names(certificate), key=_by_use)
    reached = [one for one in own if not one.startswith("*") and not is_loopback(one)]
    name = next(iter([*given, *reached]), None) or _ascii(socket.gethostname())
    return f"{parts.scheme}://{_in_url(name)}:{parts.port}/"


def sign_in_url(page: str, secret: str) -> str:
    """The link that signs in.

    The secret stands after the `#`, which a browser sends to no server: it is in no log, and a
    program that looks at links ahead of their reader does not use it up.
    """
    return f"{page}#/sign-in/{secret}"


def _by_use(name: str) -> tuple[bool, str]:
    """Names before addresses, each in the order of the alphabet."""
    return _is_address(name), name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _in_url(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _ascii(name: str) -> str:
    """A host name as URLs have it; `localhost` for a text that is none."""
    try:
        return name.encode("idna").decode("ascii")
    except UnicodeError:
        return "localhost"


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
