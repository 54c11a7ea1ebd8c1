"""Doors of the API that a stranger tries: names, descriptions, paths and links."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from fastapi import FastAPI

from edge_sdk.wire.address import Address
from server.registry.credentials import secret_sha256
from server.registry.database import Registry
from server.routes import artifacts, documentation, errors
from server.routes.authentication import Guard
from server.routes.host_names import HostCheck, OwnNames, certificate_names, checked, own_names
from server.signing.artifacts import SignedFiles
from tests.training.fleet.test_tls import certify

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SECRET = "canary-operator-secret-0123456789"
OPERATOR = {"Authorization": f"Bearer operator:{SECRET}"}


def ask(app: ASGIApp, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """One GET."""

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(once())


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    """The signed files of a folder, and a description that strangers may not read."""
    made = FastAPI(openapi_url=None, docs_url=None)
    errors.install(made)
    for name in ("metadata", "targets"):
        (tmp_path / name).mkdir()
    files = SimpleNamespace(
        registry=Registry.open(f"sqlite:///{tmp_path}/registry.db"),
        operator_sha256=secret_sha256(SECRET),
        signed=SignedFiles(tmp_path / "metadata", tmp_path / "targets"),
    )
    made.include_router(artifacts.router(cast("Any", files)))
    made.include_router(documentation.router(made))
    made.add_middleware(Guard, services=cast("Any", files))
    return made


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1:8000", 200),
        ("127.9.9.9", 200),
        ("[::1]:8000", 200),
        ("edge.example", 200),
        ("pi.fleet.example:443", 200),
        ("attacker.example", 421),
        ("localhost.attacker.example", 421),
        ("a.b.fleet.example", 421),
        ("127.0.0.1.attacker.example", 421),
        ("192.168.0.7:8000", 421),
        ("", 421),
    ],
)
def test_requests_for_names_of_others_are_refused(host: str, status: int) -> None:
    """FAULTS row 13: a web page whose name was made to point to this machine."""
    inner = FastAPI()
    inner.add_api_route("/v2", lambda: {"name": "splitedge"})
    names = OwnNames({"edge.example", "*.fleet.example"})
    answer = ask(HostCheck(inner, names), "/v2", {"Host": host})
    assert answer.status_code == status
    if status == 421:
        assert "--host-name" in answer.json()["error"]


def test_names_are_asked_for_on_loopback_alone_and_the_certificates_count(tmp_path: Path) -> None:
    inner = FastAPI()
    assert own_names(Address("0.0.0.0", 8000), None) is None
    assert checked(inner, None) is inner
    certified = certify(tmp_path / "tls", "DNS:edge.example,IP:10.0.0.1")
    assert certificate_names(certified.cert) == {"edge.example", "10.0.0.1"}
    names = own_names(Address("127.0.0.1", 8000), certified.cert, ["proxy.example"])
    guarded = checked(inner, names)
    for name in ("edge.example", "10.0.0.1", "proxy.example"):
        assert ask(guarded, "/", {"Host": name}).status_code == 404
    assert ask(guarded, "/", {"Host": "other.example"}).status_code == 421


def test_description_of_the_api_is_the_operators(app: FastAPI) -> None:
    for path in ("/docs", "/openapi.json"):
        assert ask(app, path).status_code == 401
        assert ask(app, path, OPERATOR).status_code == 200


def test_page_of_the_api_loads_nothing_from_other_hosts(app: FastAPI) -> None:
    page = ask(app, "/docs", OPERATOR)
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    loaded = re.findall(r"(?:src|href)=\"([^\"]+)\"|url: '([^']+)'", page.text)
    paths = {first or second for first, second in loaded}
    assert len(paths) == 4  # script, style, picture, description
    for path in paths:
        assert path.startswith("/")
        assert ask(app, path, OPERATOR).status_code == 200
        assert ask(app, path).status_code == 401
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert ask(app, "/docs/redoc.standalone.js", OPERATOR).status_code == 400


@pytest.mark.parametrize(
    "path", ["x" * 5_000, "/".join(["x" * 200] * 25), "%00", "%ff", "a/" * 2_000, "..%2ftargets"]
)
def test_paths_that_no_file_can_have_are_not_found(app: FastAPI, path: str) -> None:
    """FAULTS row 26."""
    assert ask(app, f"/tuf/targets/{path}", OPERATOR).status_code == 404


def test_links_among_the_signed_files_are_not_followed(app: FastAPI, tmp_path: Path) -> None:
    targets = tmp_path / "targets"
    (targets / "model").mkdir()
    (targets / "model" / "file").write_text("signed")
    (targets / "outside").symlink_to(tmp_path)
    (targets / "link").symlink_to(targets / "model" / "file")
    assert ask(app, "/tuf/targets/model/file", OPERATOR).text == "signed"
    for path in ("link", "outside/registry.db", "outside/targets/model/file", "model"):
        assert ask(app, f"/tuf/targets/{path}", OPERATOR).status_code == 404
