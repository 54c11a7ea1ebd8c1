"""What a running server writes into its audit log, and that no secret is in it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson
import pytest
import urllib3

from edge_sdk.errors import LinkError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.topics import Kind, Topic
from profiles import load_reference
from server.registry.records import AuditEntry
from server.state import existing_registry
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Device, ServerRun

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

PROFILE = load_reference("raspberry-pi-4").to_dict()


class Site:
    """A server as a process, without a model, and what its audit log holds."""

    def __init__(self, server: ServerRun, state: Path) -> None:
        self.server = server
        self.state = state
        self.secrets: list[str] = [(state / "keys" / "operator.key").read_text().strip()]

    def call(
        self, method: str, path: str, body: object = None, login: str | None = None
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Content-Type": "application/json"}
        if login is not None:
            headers["Authorization"] = f"Bearer {login}"
        raw = None if body is None else orjson.dumps(body)
        return self.server.call(method, f"/api/v1/{path}", headers=headers, body=raw)

    def as_operator(self, method: str, path: str, body: object = None) -> Any:
        reply = self.call(method, path, body, f"operator:{self.secrets[0]}")
        assert reply.status < 300, reply.data
        return reply.json()

    def enrol(self) -> tuple[str, str]:
        """Enrol a device; its id and its credential."""
        made = self.as_operator("POST", "tokens", {})["token"]
        body = {"token": made, "name": "pi", "profile": PROFILE}
        answer = self.call("POST", "enroll", body).json()
        self.secrets += [made.partition(".")[0], answer["credential"]]
        return answer["device"], answer["credential"]

    def audited(
        self, what: str, who: str | None = None, outcome: Literal["done", "refused"] | None = None
    ) -> AuditEntry:
        """The newest entry of that kind, once there is one."""

        def found() -> tuple[AuditEntry, ...]:
            with existing_registry(self.state) as registry:
                return registry.trail.entries(1, what=what, who=who, outcome=outcome)

        return wait_until(found, f"no {what} of {who}", 10)[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from tests.serving.conftest import ServerRun

    folder = tmp_path_factory.mktemp("audited")
    free = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")
    server = ServerRun(folder / "server", free, folder / "log").wait_ready()
    try:
        yield Site(server, folder / "server")
    finally:
        server.end()


def test_changes_say_who_did_them_and_from_where(site: Site) -> None:
    pi, credential = site.enrol()
    site.as_operator("PUT", f"devices/{pi}/pin", {"depth": 2})
    site.as_operator("DELETE", f"devices/{pi}/pin")
    site.as_operator("POST", f"devices/{pi}/command", {"op": "update"})
    site.as_operator("POST", f"devices/{pi}/revoke")
    for what, who in {
        "token.create": "operator",
        "device.enrol": pi,
        "device.pin": "operator",
        "device.unpin": "operator",
        "device.command": "operator",
        "device.revoke": "operator",
    }.items():
        entry = site.audited(what, who)
        assert (entry.source, entry.outcome) == ("127.0.0.1", "done")
    assert site.call("GET", f"devices/{pi}", login=f"{pi}:{credential}").status == 401
    assert "revoked" in site.audited("http.request", pi).detail


def test_refusals_and_logins_over_http_are_audited(site: Site) -> None:
    """FAULTS row 15: what a device or a stranger is refused is in the audit log."""
    pi, credential = site.enrol()
    assert site.call("GET", f"devices/{pi}", login=f"{pi}:{credential}").status == 200
    assert site.audited("http.login", pi).source == "127.0.0.1"
    assert site.audited("http.login", "operator").source == "127.0.0.1"
    for login, path in {
        f"{pi}:{credential}": "devices/other",
        f"{pi}:wrong-secret": f"devices/{pi}",
        "operator:guess-the-key": "devices",
    }.items():
        assert site.call("GET", path, login=login).status in (401, 403)
        site.secrets.append(login.partition(":")[2])
    assert site.call("POST", "enroll", {"token": "guessed", "profile": PROFILE}).status == 403
    assert site.audited("http.request").outcome == "refused"
    assert "unknown, used or expired" in site.audited("device.enrol", outcome="refused").detail


def test_refusals_and_logins_over_mqtt_are_audited(
    site: Site, device: Callable[..., Device]
) -> None:
    """FAULTS row 15: a login with a wrong credential, and topics of another device."""
    (pi, credential), (other, _) = site.enrol(), site.enrol()
    one = device(site.server.mqtt, pi, credential)
    assert site.audited("mqtt.login", pi).source == "127.0.0.1"
    one.link.publish(str(Topic("default", other, Kind.QUERY)), b"{}")
    denied = site.audited("mqtt.topic", pi)
    assert (denied.outcome, denied.source) == ("refused", "127.0.0.1")
    assert f"{other}/query" in denied.detail
    stranger = MqttLink(
        site.server.mqtt, client_id=other, username="mallory", password="wrong", mqtt5=False
    )
    stranger.start()
    try:
        with contextlib.suppress(LinkError):
            stranger.wait_connected(0.5)
        refused = site.audited("mqtt.login", other)
        assert (refused.outcome, refused.source) == ("refused", "127.0.0.1")
        assert "its user name was 'mallory'" in refused.detail
    finally:
        stranger.stop()


def test_a_credential_of_another_device_is_told_as_such(site: Site) -> None:
    """It has an entry of its own, whatever else was refused at that address in the minute."""
    (one, _), (other, credential) = site.enrol(), site.enrol()
    link = MqttLink(site.server.mqtt, client_id=one, username=one, password=credential)
    link.start()
    try:
        entry = site.audited("credential.swapped", one)
        assert (entry.outcome, entry.source) == ("refused", "127.0.0.1")
        assert f"it came with the credential of {other}" in entry.detail
    finally:
        link.stop()


def test_guessed_logins_at_the_broker_are_few_rows(site: Site) -> None:
    """FAULTS row 25: a brute force at the broker is counted, and does not fill the log."""

    async def guess(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        name = b"\x00\x04pi-1"
        body = b"\x00\x04MQTT\x04\xc2\x00\x3c" + name + name + b"\x00\x04nope"
        writer.write(bytes([0x10, len(body)]) + body)
        assert (await reader.read(4))[-1:] == b"\x05"
        writer.close()

    async def flood(address: BrokerAddress) -> None:
        for _ in range(20):
            await asyncio.gather(*(guess(address.port) for _ in range(50)))

    asyncio.run(flood(site.server.mqtt))

    def counted() -> bool:
        with existing_registry(site.state) as registry:
            entries = registry.trail.entries(10_000, outcome="refused")
        rows = [entry for entry in entries if entry.what in ("mqtt.login", "audit.dropped")]
        return sum(entry.count for entry in rows) >= 1_000 and len(rows) <= 6

    wait_until(counted, "the guesses are not counted", 15)


def test_the_operator_reads_the_log_and_no_device_does(site: Site) -> None:
    pi, credential = site.enrol()
    entries = site.as_operator("GET", f"audit?who={pi}&what=device.enrol")["entries"]
    assert [(entry["who"], entry["outcome"]) for entry in entries] == [(pi, "done")]
    site.as_operator("PUT", f"devices/{pi}/pin", {"depth": 2})
    entries = site.as_operator("GET", f"audit?about={pi}&what=device.pin")["entries"]
    assert [entry["who"] for entry in entries] == ["operator"]
    assert site.call("GET", "audit", login=f"{pi}:{credential}").status == 403
    assert site.call("GET", "audit").status == 401
    for wrong in (
        "limit=0",
        "outcome=maybe",
        "since=nan",
        "nothing=1",
        "about=%00",
        "who=%00",
        "what=a%00",
    ):
        reply = site.call("GET", f"audit?{wrong}", login=f"operator:{site.secrets[0]}")
        assert reply.status == 400


def test_no_secret_is_in_the_log(site: Site) -> None:
    """FAULTS row 34: tokens, credentials and keys, right or guessed, are nowhere in it."""
    pi, _ = site.enrol()
    body = {"token": "leaked-canary-token", "profile": PROFILE}
    assert site.call("POST", "enroll", body).status == 403
    assert site.call("GET", "devices", login=f"{pi}:canary-credential").status == 401
    assert site.call("GET", "devices", login="canary-without-colon").status == 401
    site.audited("device.enrol")
    time.sleep(1.5)  # a turn of the housekeeping
    log = orjson.dumps(site.as_operator("GET", "audit?limit=10000")).decode()
    for secret in (*site.secrets, "leaked-canary", "canary-credential", "canary-without-colon"):
        assert secret not in log
