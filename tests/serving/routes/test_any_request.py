"""Requests that the API's own description allows, and broken ones: never a 5xx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, GenerationMode
from schemathesis.core.result import Ok

from profiles import load_reference
from server.registry.operator import load_operator_secret

if TYPE_CHECKING:
    from tests.conftest import Reached
    from tests.serving.conftest import Exported, ServerRun

pytestmark = [pytest.mark.broker]

Operation = APIOperation[Any, Any, Any, Any]

# examples of each operation, in `make test` and in `make faults`
SHORT: Final = 2
FULL: Final = 100
KNOWN: Final[Mapping[str, str]] = {
    "device_id": "pi-1",
    "name": "digits",
    "version": "1",
    "fleet": "default",
    "part": "metadata",
    "path": "timestamp.json",
}
# with a name that exists these end the login or the model that the other requests are about
LAST: Final = ("revoke", "remove", "credential", "rotate", "approve", "deny", "load")
HEADERS: Final = {"inference-header-content-length": st.integers(-1, 300).map(str)}
BODIES: Final = st.one_of(
    st.none(),
    st.binary(max_size=200),
    st.sampled_from([b"{}", b"[]", b"null", b"[" * 5_000, b'{"inputs": [{}]}', b'{"a": 1e999}']),
)


@pytest.fixture
def server(
    run_server: Callable[..., ServerRun], exported: Exported, tmp_path: Path
) -> tuple[ServerRun, tuple[str | None, ...]]:
    """A server with a model and a device, and logins: none, the device's, the operator's."""
    exported.install(tmp_path / "state" / "models")
    running = run_server(tmp_path / "state").wait_ready()
    operator = f"operator:{load_operator_secret(tmp_path / 'state')}"
    profile = load_reference("raspberry-pi-4").to_dict()
    headers = {"Authorization": f"Bearer {operator}"}
    token = running.call("POST", "/api/v1/tokens", json={}, headers=headers).json()["token"]
    body = {"token": token, "name": "pi-1", "profile": profile}
    enrolled = running.call("POST", "/api/v1/enroll", json=body).json()
    return running, (None, f"pi-1:{enrolled['credential']}", operator)


@pytest.mark.timeout(3_600)
def test_no_request_gets_a_5xx(
    server: tuple[ServerRun, tuple[str | None, ...]], *, thorough: bool, reached: Reached
) -> None:
    """FAULTS row 26: every operation of the API's own description, by schemathesis."""
    running, logins = server
    description = running.call("GET", "/openapi.json").json()
    operations = [
        found.ok()
        for found in schemathesis.openapi.from_dict(description).get_all_operations()
        if isinstance(found, Ok)
    ]
    answered: dict[int, int] = {}
    bad: list[str] = []
    with requests.Session() as session:
        for operation in operations:
            # a wrong request is one with a wrong body; names and numbers are wrong in any case
            for mode in GenerationMode if _has_body(operation) else (GenerationMode.POSITIVE,):
                for status, text in _answers(
                    operation, mode, running.http, session, logins, FULL if thorough else SHORT
                ):
                    answered[status] = answered.get(status, 0) + 1
                    if status >= 500:
                        bad.append(f"{operation.label}: {status} {text}")
    total = sum(answered.values())
    reached(
        "any-request",
        f"{total:,} requests to {len(operations)} operations, {len(bad)} answered with 5xx",
        requests=total,
        server_errors=len(bad),
    )
    assert bad == []
    assert len(operations) > 30
    assert {200, 400, 401, 404} <= set(answered)
    assert "Traceback" not in running.stderr


def _answers(
    operation: Operation,
    mode: GenerationMode,
    url: str,
    session: requests.Session,
    logins: tuple[str | None, ...],
    examples: int,
) -> list[tuple[int, str]]:
    """Statuses and texts of the answers to generated requests of one operation."""
    found: list[tuple[int, str]] = []
    last = operation.method.lower() == "delete" or any(word in operation.path for word in LAST)

    @seed(11)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        operation.as_strategy(mode),
        st.sampled_from(logins),
        st.booleans(),
        BODIES,
        st.fixed_dictionaries({}, optional=HEADERS),
    )
    def ask(
        case: Any,
        login: str | None,
        known: bool,
        raw: bytes | None,
        headers: dict[str, str],
    ) -> None:
        if known and not last and case.path_parameters:
            names = {name: KNOWN.get(name, value) for name, value in case.path_parameters.items()}
            case.path_parameters = names
        if login is not None:
            headers = {**headers, "Authorization": f"Bearer {login}"}
        more: dict[str, Any] = {"headers": headers, "timeout": 30}
        if not _has_body(operation):
            more["data"] = raw  # a body that the route reads itself
        try:
            answer = case.call(url, session, **more)
        except requests.exceptions.InvalidHeader:
            return
        found.append((answer.status_code, str(answer.content[:200])))

    ask()
    return found


def _has_body(operation: Operation) -> bool:
    """Whether the description names a body."""
    return "requestBody" in operation.definition.raw
