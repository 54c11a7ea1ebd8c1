"""A server on loopback behind a proxy, as a stranger meets it over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from server.state import existing_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.serving.conftest import ServerRun

OPTIONS = (
    *("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"),
    *("--host-name", "edge.example"),
)
NAME = {"Host": "edge.example"}


def test_strangers_get_nothing_and_the_cookie_is_kept_to_https(
    tmp_path: Path, run_server: Callable[..., ServerRun]
) -> None:
    run = run_server(tmp_path / "state", OPTIONS).wait_ready()

    def status(path: str, method: str = "GET") -> int:
        return run.call(method, path, headers=NAME).status

    assert status("/v2/health/live") == 200
    for path in ("/metrics", "/openapi.json", "/docs", "/v2"):
        assert status(path) == 401, path
        assert status(f"{path}%0A") == 404, path
    assert status("/v2/models/digits/infer", "POST") == 401
    assert run.call("GET", "/v2").status == 401, "a proxy may send its own name for the server"
    with existing_registry(tmp_path / "state") as registry:
        link = registry.sign_ins.new_link()
        headers = {
            **NAME,
            "Origin": "https://edge.example",
            "X-Forwarded-Proto": "https",
            "X-Forwarded-For": "203.0.113.7",
        }
        answer = run.call("POST", "/dashboard/session", json={"link": link}, headers=headers)
        assert answer.status == 200, answer.data
        assert "__Host-" in answer.headers["set-cookie"]
        assert "Secure" in answer.headers["set-cookie"]
