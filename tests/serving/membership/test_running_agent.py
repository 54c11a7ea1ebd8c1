"""A running agent and its server, on either broker: approval, new credentials, quarantine, end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_sdk import EdgeAgent, api
from edge_sdk.bundles.store import BundleRecord, BundleStore, FileRecord
from edge_sdk.bundles.update import update
from edge_sdk.errors import EnrolmentError
from edge_sdk.identity import Identity
from edge_sdk.membership.approval import wait_for_approval
from edge_sdk.offload.availability import Presence
from profiles import load_reference
from server.processes import ServerProcess
from server.state import existing_registry
from server.tokens import create_token
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

X = np.zeros((1, 8, 8), np.float32)
REVOKED_S = 10.0


class Site:
    """A server as a process, and an agent in this process that asks it."""

    def __init__(self, broker: str, models: Path, folder: Path) -> None:
        self.state = folder / "server"
        self.device = folder / "pi"
        self.state.mkdir()
        (self.state / "models").symlink_to(models)
        self.server = ServerProcess(self.state)
        ports = ("--http", "127.0.0.1:0", "--mqtt", f"{broker}:127.0.0.1:0")
        self.server.start((*ports, "--enrolment", "approve"))
        profile = load_reference("raspberry-pi-4")
        token = create_token(self.state)
        pi = api.enroll(self.server.http, token, self.device, profile=profile, name="pi")
        assert "waits for approval" in update(self.device).reason
        with existing_registry(self.state) as registry:
            registry.membership.approve("pi")
        wait_for_approval(pi, print)
        assert update(self.device).status == "installed"
        self.agent = EdgeAgent.open(self.device)
        self.wait_served()

    def wait_served(self) -> None:
        """Wait until the server answers a query of the agent."""
        wait_until(
            lambda: self.agent.predict(X, threshold=-1.0, deadline_s=2).source == "server",
            self.agent.status,
            30,
        )

    def orders(self) -> list[str]:
        """What devices have not done yet."""
        with existing_registry(self.state) as registry:
            return [order.op for order in registry.membership.orders()]

    def close(self) -> None:
        """Stop both."""
        self.agent.close()
        self.server.stop()


BROKERS = ("embedded", "mosquitto")


@pytest.fixture(scope="module", params=BROKERS)
def site(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    site = Site(request.param, models, tmp_path_factory.mktemp("site"))
    yield site
    site.close()


def test_a_device_replaces_its_credential_when_it_is_told(site: Site) -> None:
    before = Identity.load(site.device)
    with existing_registry(site.state) as registry:
        registry.membership.ask_to_rotate("pi")
    wait_until(lambda: Identity.load(site.device) != before, "no new credential", 20)
    wait_until(lambda: not site.orders(), "the order is not done", 5)
    with pytest.raises(EnrolmentError, match="wrong credential"):
        api.is_approved(before)
    site.wait_served()
    with existing_registry(site.state) as registry:
        whats = [entry.what for entry in registry.trail.entries(who="pi")]
        refused = registry.trail.entries(what="mqtt.login", outcome="refused")
    assert {"credential.new", "credential.confirm"} <= set(whats)
    assert sum(entry.count for entry in refused) <= 1  # it may have come back once with the old one


def test_an_agent_replaces_its_credential_by_itself_and_restarts_with_it(site: Site) -> None:
    before = Identity.load(site.device)
    site.agent.rotate()
    assert Identity.load(site.device) != before
    site.wait_served()
    site.agent.close()
    site.agent = EdgeAgent.open(site.device)
    site.wait_served()


def test_a_quarantine_is_lifted_by_the_operator(site: Site) -> None:
    store = BundleStore(site.device)
    bundle = "bench-tiny/7/d1"
    record = BundleRecord(bundle, {"manifest.json": FileRecord("0" * 64, 1)})
    store.quarantine(record, "logits are not finite")
    report = {"running": None, "bundle": bundle, "status": "refused", "reason": "not finite"}
    api.report_update(Identity.load(site.device), report)
    with existing_registry(site.state) as registry:
        assert registry.membership.refused_bundles("pi") == {bundle: "not finite"}
        registry.membership.lift("pi", bundle)
        assert registry.membership.refused_bundles("pi") == {}
    wait_until(lambda: not store.quarantined(), "still quarantined", 20)
    wait_until(lambda: not site.orders(), "the order is not done", 5)


@pytest.fixture(params=BROKERS)
def own_site(request: pytest.FixtureRequest, models: Path, tmp_path: Path) -> Iterator[Site]:
    """A site for one test, which revokes its device: a second run of it needs another one."""
    site = Site(request.param, models, tmp_path)
    yield site
    site.close()


def test_a_stolen_device_is_shut_out_under_traffic(
    own_site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS row 24: revoked under traffic, it is cut and refused within 10 s."""
    site = own_site
    caplog.set_level(logging.INFO)
    answered: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            if site.agent.predict(X, threshold=-1.0, deadline_s=1).source == "server":
                answered.append(time.monotonic())

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        wait_until(lambda: len(answered) > 20, "no traffic")
        with existing_registry(site.state) as registry:
            registry.revoke("pi")
        revoked = time.monotonic()
        away = Presence.AWAY.value
        wait_until(lambda: site.agent.status().presence == away, "still connected", REVOKED_S)
        with pytest.raises(EnrolmentError, match="revoked"):
            api.is_approved(Identity.load(site.device))
        wait_until(lambda: "it is revoked" in site.agent.predict(X, threshold=-1.0).reason, "why?")
        assert any("it is revoked" in line for line in caplog.messages)
        time.sleep(1)
    finally:
        stop.set()
        for thread in asking:
            thread.join()
    assert answered[-1] - revoked < REVOKED_S
