"""The dashboard's files: one page, its style and its scripts, as the installed package has them.

Scripts and styles lie under a name that changes with their content, so browsers keep them. The page
itself runs nothing but these files and loads nothing from elsewhere; its policy says so to the
browser, without exceptions.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fastapi import APIRouter, Request, Response

from server.errors import ServerError

PAGE: Final = "index.html"
ASSETS: Final = "dashboard/assets"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


class NoFileError(ServerError):
    """No such file of the dashboard."""

    status = 404


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, plain and compressed."""

    type: str
    content: bytes
    compressed: bytes


@dataclass(frozen=True, slots=True)
class Assets:
    """All files by their names; `version` changes with any content."""

    version: str
    files: dict[str, Asset]


@cache
def assets() -> Assets:
    """The files of the package, read once, with the page's links made to lead to them."""
    found = dict(sorted(_read(files("server.dashboard") / "static", "")))
    digest = hashlib.sha256()
    for name, content in found.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    version = digest.hexdigest()[:12]
    base = f"{ASSETS}/{version}"
    modules = [n for n in found if n.endswith(".js") and n not in {"app.js", "vendor/uplot.js"}]
    preloads = "\n".join(f'    <link rel="modulepreload" href="{base}/{name}">' for name in modules)
    page = found[PAGE].decode().replace("<!-- modules -->", preloads).replace("BASE", base)
    found[PAGE] = page.encode()
    return Assets(version, {name: _asset(name, content) for name, content in found.items()})


def router() -> APIRouter:
    """The page at `/`, and its files."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page(request: Request) -> Response:
        """The page; what it shows, it asks for with the session."""
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
        return _answer(assets().files[PAGE], request, headers)

    @routes.get("/favicon.ico")
    async def icon(request: Request) -> Response:
        """The icon of the page, for browsers that ask before they have read the page."""
        return _answer(assets().files["icon.svg"], request, {"Cache-Control": "max-age=86400"})

    @routes.get(f"/{ASSETS}/{{version}}/{{name:path}}")
    async def file(version: str, name: str, request: Request) -> Response:
        """One file of the page."""
        asset = assets().files.get(name)
        if version != assets().version or asset is None or name == PAGE:
            raise NoFileError("no such file of the dashboard; load the page again")
        return _answer(asset, request, {"Cache-Control": "max-age=31536000, immutable"})

    return routes


def _answer(asset: Asset, request: Request, headers: dict[str, str]) -> Response:
    headers = {**SAFE_HEADERS, **headers, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(asset.compressed, media_type=asset.type, headers=headers)
    return Response(asset.content, media_type=asset.type, headers=headers)


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found = []
    for each in folder.iterdir():
        name = f"{prefix}{each.name}"
        found += _read(each, f"{name}/") if each.is_dir() else [(name, each.read_bytes())]
    return found


def _asset(name: str, content: bytes) -> Asset:
    kind = _TYPES["." + name.rpartition(".")[2]]
    return Asset(kind, content, gzip.compress(content, 9, mtime=0))
