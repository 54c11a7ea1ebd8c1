"""The dashboard over a registry on disk, without a server around it; and a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser

from benchmarks.dashboard.browser import chromium as running_chromium
from edge_sdk.wire.address import Address
from profiles import load_reference
from server.dashboard import dashboard
from server.registry.credentials import secret_sha256
from server.registry.database import Registry
from server.registry.records import Device
from server.routes import errors
from server.settings import ServerSettings

FREE = Address("127.0.0.1", 0)
ORIGIN = "http://pi.local:8000"


class World:
    """A registry, the dashboard over it, and one browser's cookies.

    Attributes:
        cut_off: ids of devices whose connections were cut. chosen: those whose bundle was chosen.
    """

    def __init__(self, folder: Path) -> None:
        self.registry = Registry.open(f"sqlite:///{folder}/registry.db")
        self.settings = ServerSettings(folder, FREE, FREE)
        self.operator_sha256 = secret_sha256("operator")
        self.assigner = SimpleNamespace(check_pin=lambda *_: None)
        self.cut_off: list[str] = []
        self.chosen: list[str] = []
        self.cookies = httpx.Cookies()
        self.app = FastAPI()
        errors.install(self.app)
        self.app.include_router(dashboard.router(cast("Any", self)))

    def expel(self, device: Device) -> None:
        self.cut_off.append(device.id)

    def reassign(self, device_id: str, *, left: bool = False) -> Device:
        self.chosen.append(device_id)
        return self.registry.device(device_id)

    def root_bytes(self, fingerprint: str = "") -> bytes:
        return b"root"

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        base: str = ORIGIN,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """One request as the page's own browser sends it; `headers` go over that."""
        own = {} if method == "GET" else {"Origin": base}
        wanted = {**own, **(headers or {})}

        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url=base, cookies=self.cookies
            ) as client:
                answer = await client.request(method, path, json=body, headers=wanted)
                self.cookies = client.cookies
                return answer

        return asyncio.run(once())

    def sign_in(self, name: str | None = None, *, base: str = ORIGIN) -> httpx.Response:
        """Use a new link up."""
        link = self.registry.sign_ins.new_link(name)
        return self.ask("POST", "/dashboard/session", {"link": link}, base=base)

    def act(self, path: str, body: object = None, **more: Any) -> httpx.Response:
        """One action."""
        return self.ask("POST", f"/dashboard/actions/{path}", body, **more)

    def facts(self, path: str) -> Any:
        """The facts of a page."""
        answer = self.ask("GET", f"/dashboard/facts/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def enrol(self, name: str, *, fleet: str = "default", approve: bool = False) -> Device:
        """A device."""
        token = self.registry.create_token(fleet, approve=approve)
        profile = load_reference("raspberry-pi-4").to_dict()
        return self.registry.redeem_token(token, name, profile)[0]

    def last_change(self) -> tuple[str, str, str]:
        """Who did what to whom, the newest entry of the audit log."""
        entry = self.registry.trail.entries(1)[0]
        return entry.who, entry.what, entry.detail


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Nobody is signed in."""
    made = World(tmp_path)
    yield made
    made.registry.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A real browser. The tests fail if it is not installed.

    It ends with its module: while it runs, Playwright's event loop runs in the main thread, where
    other tests start their own.
    """
    with running_chromium() as browser:
        yield browser
