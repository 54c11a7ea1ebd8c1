"""The files of the page: nothing from elsewhere, nothing inline, kept by their content."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from server.dashboard import dashboard
from server.dashboard.links import first_link, page_url, read_page_url, sign_in_url
from server.dashboard.pages import assets
from tests.training.fleet.test_tls import certify

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.dashboard.conftest import World

OWN = re.compile(r"https?://(?:github\.com|www\.w3\.org)/")


def test_the_page_loads_what_is_there_and_its_policy_has_no_exception(world: World) -> None:
    page = world.ask("GET", "/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    named = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert len(named) > 10
    for name in named:
        answer = world.ask("GET", f"/{name}", headers={"Accept-Encoding": "identity"})
        assert answer.status_code == 200, name
        assert "immutable" in answer.headers["cache-control"]
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style| on[a-z]+=| style=", page.text)


def test_files_are_compressed_and_weigh_little(world: World) -> None:
    page = world.ask("GET", "/")
    names = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    compressed = {"Accept-Encoding": "gzip"}
    answers = [world.ask("GET", f"/{name}", headers=compressed) for name in names]
    sizes = [int(answer.headers["content-length"]) for answer in answers]
    assert all(answer.headers["content-encoding"] == "gzip" for answer in answers)
    assert sum(sizes) < 80_000, "a phone on a bad link loads this"


def test_no_file_names_another_server() -> None:
    for name, asset in assets().files.items():
        if name.startswith("vendor/") and name.endswith(".txt"):
            continue
        found = re.findall(r"https?://[^\s\"'`)]*", asset.content.decode())
        assert [url for url in found if not OWN.match(url)] == [], name


def test_files_of_another_version_are_not_mixed_in(world: World) -> None:
    version = assets().version
    assert world.ask("GET", f"/dashboard/assets/{version}/app.js").status_code == 200
    assert world.ask("GET", "/dashboard/assets/000000000000/app.js").status_code == 404
    for name in ("..%2f__init__.py", "%2e%2e%2fpages.py", "index.html", "", "vendor"):
        assert world.ask("GET", f"/dashboard/assets/{version}/{name}").status_code == 404


def test_licences_lie_beside_the_files_of_others(world: World) -> None:
    text = world.ask("GET", f"/dashboard/assets/{assets().version}/vendor/LICENSES.txt").text
    for name in assets().files:
        if name.startswith("vendor/") and not name.endswith(".txt"):
            assert name.removeprefix("vendor/") in text


def test_a_server_without_the_dashboard_says_so(world: World) -> None:
    world.settings = replace(world.settings, dashboard=False)
    app = FastAPI()
    app.include_router(dashboard.router(cast("Any", world)))
    client = TestClient(app)
    answer = client.get("/")
    assert (answer.status_code, "--no-dashboard" in answer.text) == (404, True)
    assert client.get("/dashboard/session").status_code == 404


def test_a_link_leads_to_a_name_that_others_can_reach(tmp_path: Path) -> None:
    assert page_url("http://127.0.0.1:8000") == "http://127.0.0.1:8000/"
    assert page_url("http://[::1]:8000") == "http://[::1]:8000/"
    certified = certify(tmp_path / "tls", "DNS:*.example,DNS:pi.example")
    assert page_url("https://0.0.0.0:8443", certified.cert) == "https://pi.example:8443/"
    assert "0.0.0.0" not in page_url("http://0.0.0.0:8000")
    local = certify(tmp_path / "local", "DNS:localhost,IP:127.0.0.1,IP:10.0.0.1")
    assert page_url("https://0.0.0.0:8443", local.cert) == "https://10.0.0.1:8443/"
    given = ("*.example", "edge.example")
    assert page_url("https://0.0.0.0:8443", local.cert, given) == "https://edge.example:8443/"
    assert page_url("http://127.0.0.1:8000", None, given) == "https://edge.example/", "a proxy's"
    assert sign_in_url("http://pi:8000/", "secret") == "http://pi:8000/#/sign-in/secret"


@pytest.mark.parametrize(
    ("machine", "host"), [("b\u00fcro", "xn--bro-hoa"), ("x" * 64 + "\u00fc", "localhost")]
)
def test_a_machine_whose_name_is_not_ascii_starts_too(
    monkeypatch: pytest.MonkeyPatch, machine: str, host: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: machine)
    assert page_url("http://0.0.0.0:8000") == f"http://{host}:8000/"


def test_the_first_link_keeps_the_address_for_the_next_one(world: World, tmp_path: Path) -> None:
    assert read_page_url(tmp_path) is None
    link = first_link(tmp_path, world.registry, "http://pi:8000/")
    assert link is not None
    assert link.startswith("http://pi:8000/#/sign-in/")
    assert read_page_url(tmp_path) == "http://pi:8000/"
