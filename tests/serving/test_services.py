"""The server's parts together: models that come and break, devices that are shut out."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from fastapi.testclient import TestClient

from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import ModelManifest
from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.messages import Problem, Query
from edge_sdk.wire.topics import Kind
from profiles import load_reference
from server.app import create_app
from server.backend.ladder import LadderEngine
from server.backend.models import ModelStore
from server.errors import NotReadyError, UnknownModelError
from server.registry.database import Registry
from server.registry.location import existing_location
from server.registry.operator import load_or_create_operator_secret
from server.registry.records import Device as Record
from server.services import Services
from server.settings import ServerSettings, parse_broker
from server.signing import clock as signing_clock
from tests.commands import Splitedge
from tests.serving.running_services import FREE, enrol, wait_turns
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Device, Exported


@pytest.fixture
def services(exported: Exported, tmp_path: Path) -> Iterator[Services]:
    """Running, with `digits/1`."""
    exported.install(tmp_path / "state" / "models")
    running = Services(ServerSettings(tmp_path / "state", FREE, FREE, threads=1))
    running.start()
    yield running
    running.stop()


def broker_of(services: Services) -> BrokerAddress:
    return BrokerAddress.parse(services.broker_address()["url"])


# the model store, without a broker


def test_the_highest_version_is_active_and_numbers_are_not_text(
    exported: Exported, tmp_path: Path
) -> None:
    for version in (2, 10, 9):
        exported.install(tmp_path, version=version)
    store = ModelStore(tmp_path)
    with pytest.raises(NotReadyError, match="splitedge export"):
        store.get()
    store.load()
    assert [model.manifest.version for model in store.all()] == ["2", "9", "10"]
    assert store.get().manifest.version == "10"
    assert store.get("digits", "9").manifest.version == "9"
    assert store.get(None, "2").manifest.version == "2"
    with pytest.raises(UnknownModelError, match=r"letters.*available: digits version 2, digits"):
        store.get("letters")


def test_the_version_that_is_told_is_active_and_the_highest_where_none_is(
    exported: Exported, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        exported.install(tmp_path, version=version)
    store = ModelStore(tmp_path)
    store.load()
    store.activate({"digits": "2"})
    assert store.get().manifest.version == "2"
    assert store.get("digits").manifest.version == "2"
    assert store.get("digits", "3").manifest.version == "3"
    for elsewhere in ({"digits": "9"}, {"letters": "1"}):
        store.activate(elsewhere)
        assert store.get("digits").manifest.version == "3"


def test_queries_are_refused_while_an_unloaded_model_is_loaded(
    exported: Exported, tmp_path: Path
) -> None:
    exported.install(tmp_path, version=1)
    exported.install(tmp_path, version=2)
    reading, go_on = threading.Event(), threading.Event()
    go_on.set()

    def slow(_folder: Path, _manifest: ModelManifest) -> None:
        reading.set()
        assert go_on.wait(20)

    store = ModelStore(tmp_path, check=slow)
    store.load()
    store.unload("digits")
    reading.clear()
    go_on.clear()
    loading = threading.Thread(target=store.load_name, args=("digits",))
    loading.start()
    try:
        assert reading.wait(20)
        for name, version in (("digits", None), (None, None), ("digits", "2")):
            with pytest.raises(UnknownModelError):
                store.served(name, version)
    finally:
        go_on.set()
        loading.join()
    assert store.served("digits").manifest.version == "2"


def test_a_version_whose_folder_is_deleted_is_served_no_more(
    exported: Exported, tmp_path: Path
) -> None:
    for version in (1, 2):
        exported.install(tmp_path, version=version)
    store = ModelStore(tmp_path)
    store.load()
    store.activate({"digits": "2"})
    shutil.rmtree(tmp_path / "digits" / "2")
    store.load()
    assert [model.manifest.version for model in store.all()] == ["1"]
    assert store.get().manifest.version == "1"
    shutil.rmtree(tmp_path / "digits")
    store.load()
    assert not store.ready


def test_a_broken_model_is_read_again_when_its_files_change_or_when_asked(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported.install(tmp_path)
    whole = (folder / "segments" / "1-2.onnx").read_bytes()
    damage(folder, "segment cut off")
    tried: list[Path] = []

    class Counted(LadderEngine):
        def __init__(self, folder: Path, manifest: ModelManifest, **options: Any) -> None:
            tried.append(folder)
            super().__init__(folder, manifest, **options)

    monkeypatch.setattr("server.backend.models.LadderEngine", Counted)
    store = ModelStore(tmp_path)
    for _ in range(5):
        store.load()
    assert len(tried) == 1
    store.load(again=True)
    assert len(tried) == 2
    (folder / "segments" / "1-2.onnx").write_bytes(whole)
    store.load()
    assert (len(tried), store.ready, store.broken()) == (3, True, {})


def damage(folder: Path, how: str) -> None:
    """Break a model as disks and hands do."""
    if how == "manifest cut off":
        path = folder / "model.json"
        path.write_bytes(path.read_bytes()[:100])
    elif how == "segment cut off":
        path = folder / "segments" / "1-2.onnx"
        path.write_bytes(path.read_bytes()[:100])
    elif how == "segment gone":
        (folder / "segments" / "0-1.onnx").unlink()
    elif how == "other name":
        folder.rename(folder.with_name("77"))


@pytest.mark.parametrize(
    "how", ["manifest cut off", "segment cut off", "segment gone", "other name"]
)
def test_a_broken_model_is_reported_once_and_the_others_serve(
    exported: Exported, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    exported.install(tmp_path, version=1)
    damage(exported.install(tmp_path, version=2), how)
    version = "77" if how == "other name" else "2"
    store = ModelStore(tmp_path)
    for _ in range(3):
        store.load()
    assert list(store.broken()) == [("digits", version)]
    assert store.get().manifest.version == "1"
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1

    shutil.rmtree(tmp_path / "digits" / version)
    store.load()
    assert store.broken() == {}


def test_an_export_that_is_being_written_is_not_loaded(exported: Exported, tmp_path: Path) -> None:
    whole = exported.install(tmp_path)
    hidden = whole.rename(whole.with_name(".1-abcdef"))
    store = ModelStore(tmp_path)
    store.load()
    assert (store.all(), store.broken()) == ([], {})
    hidden.rename(whole)
    store.load()
    assert store.get().folder == whole


# models, while it runs


@pytest.mark.broker
def test_a_model_that_appears_is_served_and_devices_are_told(
    exported: Exported, tmp_path: Path, device: Callable[..., Device]
) -> None:
    services = Services(ServerSettings(tmp_path, FREE, FREE, threads=1))
    services.start()
    try:
        credential = enrol(services, "pi-1")
        pi = device(broker_of(services), "pi-1", credential)
        assert pi.ask(Query("p", None, None, None)).problem is Problem.NOT_READY
        assert services.assign(services.registry.device("pi-1")) is None

        exported.install(tmp_path / "models")

        pi.wait(lambda: pi.commands, 5)
        assert pi.commands == [{"op": "update"}]
        reply = pi.ask(exported.query(0, exported.x[:1], id="new"))
        assert reply.tensors["logits"].argmax() == exported.logits(exported.x[:1]).argmax()
        bundle = services.assign(services.registry.device("pi-1"))
        assert bundle is not None
        assert bundle.startswith("digits/1/d")
        targets = services.artifacts.targets_folder
        assert list((targets / "bundles" / bundle).glob("*.manifest.json"))
    finally:
        services.stop()


@pytest.mark.deadline
@pytest.mark.broker
def test_bundles_that_cannot_be_signed_are_tried_again(
    services: Services,
    exported: Exported,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = exported.install(tmp_path / "elsewhere", version=2)
    kept = (whole / "bundles" / "d2" / "exit.onnx").rename(tmp_path / "kept")
    target = whole.rename(tmp_path / "state" / "models" / "digits" / "2")
    wait_until(lambda: len(services.models.all()) == 2, "not served")
    wait_turns(services, monkeypatch)
    assert services.models.get("digits", "2").folder == target
    assert services.models.get("digits").manifest.version == "1"  # what devices have, too
    logged = [record for record in caplog.records if "not published" in record.getMessage()]
    assert len(logged) == 1
    assert not any(model.version == 2 for model in services.registry.catalogue.versions())

    kept.rename(target / "bundles" / "d2" / "exit.onnx")
    wait_until(
        lambda: [m.version for m in services.registry.catalogue.versions() if m.active] == [2],
        "not published",
    )
    wait_until(lambda: services.models.get("digits").folder == target, "not active")


@pytest.mark.deadline
@pytest.mark.broker
def test_http_serves_the_version_that_devices_are_assigned(
    services: Services, exported: Exported, tmp_path: Path
) -> None:
    enrol(services, "pi-1")

    def both() -> tuple[str, str]:
        bundle = services.assign(services.registry.device("pi-1")) or ""
        return services.models.get("digits").manifest.version, bundle.split("/")[1]

    exported.install(tmp_path / "state" / "models", version=2)
    wait_until(lambda: both() == ("2", "2"), "the new one is not active")
    other = Registry.open(f"sqlite:///{tmp_path / 'state' / 'registry.db'}")
    other.catalogue.activate("digits", 1)  # back, by another process
    other.close()
    wait_until(lambda: both() == ("1", "1"), "the old one is not active again")
    shutil.rmtree(tmp_path / "state" / "models" / "digits" / "1")
    wait_until(lambda: both() == ("2", "2"), "the active one is gone, and nothing took its place")


@pytest.mark.deadline
@pytest.mark.broker
def test_a_broken_model_is_in_the_index_and_stops_nothing(
    services: Services, exported: Exported, tmp_path: Path, splitedge: Splitedge
) -> None:
    whole = exported.install(tmp_path / "elsewhere", version=2)
    damage(whole, "segment cut off")
    whole.rename(tmp_path / "state" / "models" / "digits" / "2")
    exported.install(tmp_path / "state" / "models", version=3)
    wait_until(lambda: services.models.get().manifest.version == "3", "version 3 is not served")
    with TestClient(create_app(services)) as client:
        index = client.post("/v2/repository/index").json()
        key = f"operator:{load_or_create_operator_secret(tmp_path / 'state')}"
        listed = client.get("/api/v1/models", headers={"Authorization": f"Bearer {key}"}).json()
        assert client.get("/v2/health/ready").status_code == 200
        missing = client.get("/v2/models/digits/versions/2")
    states = {entry["version"]: (entry["state"], bool(entry["reason"])) for entry in index}
    assert states == {"1": ("READY", False), "3": ("READY", False), "2": ("UNAVAILABLE", True)}
    (bad,) = listed["not_loaded"]
    assert (bad["model"], bad["version"]) == ("digits", "2")
    # the command says the same, and loads what was never published alone
    command = splitedge("server", "models", "list", "--state", tmp_path / "state", "--json").json
    assert command == listed
    said = splitedge("server", "models", "list", "--state", tmp_path / "state").err
    assert said.startswith(f"warning: {tmp_path}/state/models/digits/2 cannot be loaded, so it is")
    assert missing.status_code == 404
    assert "available: digits version 1, digits version 3" in missing.json()["error"]


# devices


@pytest.mark.deadline
@pytest.mark.broker
def test_a_device_revoked_by_another_process_is_cut_within_ten_seconds(
    services: Services, tmp_path: Path, device: Callable[..., Device]
) -> None:
    """FAULTS row 24."""
    one = device(broker_of(services), "pi-1", enrol(services, "pi-1"))
    two = device(broker_of(services), "pi-2", enrol(services, "pi-2"))
    other = Registry.open(f"sqlite:///{tmp_path / 'state' / 'registry.db'}")
    other.revoke("pi-1")
    other.close()
    wait_until(lambda: not one.link.connected, "still connected", 10)
    wait_until(lambda: "Not authorized" in one.link.last_error, "let in again")
    assert two.link.connected
    assert two.ask(Query("p", None, None, None)).problem is None


@pytest.mark.deadline
@pytest.mark.broker
def test_a_device_revoked_here_is_cut_at_once(
    services: Services, device: Callable[..., Device]
) -> None:
    """FAULTS row 24."""
    one = device(broker_of(services), "pi-1", enrol(services, "pi-1"))
    services.expel(services.registry.revoke("pi-1"))
    wait_until(lambda: not one.link.connected, "still connected", 2)


@pytest.mark.deadline
@pytest.mark.broker
def test_a_disk_that_fails_for_models_keeps_nobody_in(
    services: Services, device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each duty of the housekeeper has its turn, even if the one before failed."""
    one = device(broker_of(services), "pi-1", enrol(services, "pi-1"))
    before = services.registry.device("pi-1").last_seen
    tried: list[bool] = []

    def fails(*, again: bool = False) -> None:
        tried.append(again)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(services.models, "load", fails)
    wait_until(lambda: tried, "the housekeeper had no turn")
    assert one.link.publish(one.topic(Kind.TELEMETRY), b"{}", qos=0)
    wait_until(lambda: services.registry.device("pi-1").last_seen != before, "not seen")
    services.registry.revoke("pi-1")
    wait_until(lambda: not one.link.connected, "still connected")


@pytest.mark.deadline
@pytest.mark.broker
def test_devices_are_read_again_only_when_the_registry_changed(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrol(services, "pi-1")
    change = services.registry.last_change()
    wait_until(lambda: services._followed == change, "not followed")
    wait_until(lambda: services._devices_read == change, "not read")  # later in the same turn
    looks: list[float] = []
    read = services.registry.devices

    def counted(fleet: str | None = None, *, profiles: bool = True) -> tuple[Record, ...]:
        looks.append(time.monotonic())
        return read(fleet, profiles=profiles)

    monkeypatch.setattr(services.alerts, "turn", lambda: None)  # it looks at them every 10 s
    monkeypatch.setattr(services.registry, "devices", counted)
    wait_turns(services, monkeypatch, 2)
    assert looks == []
    services.registry.revoke("pi-1")
    wait_until(lambda: looks, "the revocation was not seen", 5)


@pytest.mark.deadline
@pytest.mark.broker
def test_devices_are_seen_by_what_they_say_however_long_it_runs(
    services: Services, device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = {name: enrol(services, name) for name in ("pi-1", "pi-2")}
    for name, credential in credentials.items():
        wait_turns(services, monkeypatch)
        pi = device(broker_of(services), name, credential)
        before = services.registry.device(name).last_seen
        assert pi.link.publish(pi.topic(Kind.TELEMETRY), b"{}", qos=0)
        wait_until(lambda: services.registry.device(name).last_seen != before, "not seen")  # noqa: B023 - called within this turn


@pytest.mark.broker
def test_stronger_devices_get_deeper_bundles(services: Services) -> None:
    depths = []
    for name in ("raspberry-pi-zero-2-w", "jetson-orin-nano"):
        enrol(services, name, name)
        bundle = services.assign(services.registry.device(name))
        assert bundle is not None
        device = services.registry.device(name)
        assert (device.bundle, f"digits/1/d{device.depth}") == (bundle, bundle)
        depths.append(device.depth or 0)
    assert depths == sorted(depths)


@pytest.mark.broker
def test_enrolled_over_http_and_let_in_at_the_broker(
    services: Services, device: Callable[..., Device]
) -> None:
    token = services.registry.create_token()
    profile = load_reference("raspberry-pi-4").to_dict()
    with TestClient(create_app(services)) as client:
        answer = client.post(
            "/api/v1/enroll", json={"token": token, "name": "pi-9", "profile": profile}
        ).json()
        pi = device(BrokerAddress.parse(answer["broker"]["url"]), "pi-9", answer["credential"])
        assert pi.ask(Query("p", None, None, None)).problem is None
        login = {"Authorization": f"Bearer pi-9:{answer['credential']}"}
        path = "/tuf/metadata/timestamp.json"
        assert client.get(path).status_code == 401
        assert orjson.loads(client.get(path, headers=login).content)["signed"]["_type"]
        for bad in ("/tuf/metadata/../../registry.db", "/tuf/keys/targets.pem", "/tuf/metadata/"):
            assert client.get(bad, headers=login).status_code == 404


# starting and stopping


@pytest.mark.broker
@pytest.mark.parametrize(
    ("http", "public", "warned"),
    [
        ("0.0.0.0:0", None, True),
        ("0.0.0.0:0", "mqtt://edge.example:1883", False),
        ("0.0.0.0:0", "mqtt://127.0.0.1:1884", True),
        ("127.0.0.1:0", None, False),
    ],
)
def test_a_broker_that_devices_cannot_reach_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, http: str, public: str | None, warned: bool
) -> None:
    insecure = http.startswith("0")
    services = Services(
        ServerSettings(
            tmp_path, Address.parse(http, "--http"), FREE, mqtt_public=public, insecure=insecure
        )
    )
    services.start()
    services.stop()
    logged = [line for line in caplog.messages if "cannot reach the broker" in line]
    assert len(logged) == warned
    told = public or services.broker.address.url
    assert all("--mqtt-public" in line and told in line for line in logged)
    assert all(("or an earlier one" in line) == bool(public) for line in logged)
    assert services.broker_address()["url"] == (public or services.broker.address.url)


@pytest.mark.deadline
@pytest.mark.broker
def test_a_duty_that_fails_at_every_turn_is_told_once(
    services: Services, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of the program, not one of ours: its traceback a second would fill the disk."""
    turns = []
    caplog.set_level(logging.INFO, "server.every_role.duties")

    def fail() -> None:
        turns.append(1)
        raise RuntimeError(f"fault {len(turns)}")

    monkeypatch.setattr(services.audit, "write", fail)
    wait_until(lambda: len(turns) >= 3, "no three turns")
    monkeypatch.undo()
    wait_until(lambda: "audit log: works again" in caplog.text, lambda: caplog.text)
    assert caplog.text.count("audit log: housekeeping failed") == 1
    assert caplog.text.count("Traceback") == 1


def wait_full_check(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until the housekeeper has looked at everything, changed or not."""
    services._next_full_check = 0.0
    wait_turns(services, monkeypatch, 2)


@pytest.mark.deadline
@pytest.mark.broker
def test_a_wrong_clock_deletes_nothing_that_is_kept(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Years ahead, all of the audit log would be too old."""
    old = time.time() - 800 * 86_400
    location = existing_location(services.settings.state)
    with closing(Registry.open(location.address, clock=lambda: old)) as registry:
        registry.create_token(note="of old")
    services.registry.create_token()
    trail = services.registry.trail
    with monkeypatch.context() as patch:
        patch.setattr(signing_clock, "BUILD_DATE", datetime.now(UTC) + timedelta(days=365))
        wait_full_check(services, monkeypatch)
        assert [one for one in trail.entries() if "of old" in one.detail]
    wait_full_check(services, monkeypatch)
    assert not [one for one in trail.entries() if "of old" in one.detail]


@pytest.mark.deadline
@pytest.mark.broker
def test_by_a_wrong_clock_tables_still_have_their_bounds(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing_clock, "BUILD_DATE", datetime.now(UTC) + timedelta(days=365))
    monkeypatch.setattr(services.audit, "_rows", 2)
    for _ in range(4):
        services.registry.create_token()
    wait_full_check(services, monkeypatch)
    assert len(services.registry.trail.entries(what="token.create")) == 2


@pytest.mark.deadline
def test_stop_leaves_no_thread_and_answers_what_waits(exported: Exported, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    exported.install(tmp_path / "models")
    services = Services(ServerSettings(tmp_path, FREE, FREE, threads=1))
    services.start()
    assert len(set(threading.enumerate()) - before) >= 3
    services.stop()
    wait_until(lambda: set(threading.enumerate()) <= before, "a thread runs on", 5)


@pytest.mark.parametrize("broker", ["embedded:0.0.0.0:0", "mqtt://broker.example"])
@pytest.mark.parametrize("http", ["0.0.0.0:0", "192.0.2.1:8000", "127.0.0.1:0"])
def test_nothing_listens_off_loopback_in_the_clear(tmp_path: Path, http: str, broker: str) -> None:
    """FAULTS row 13."""

    def settings(*, insecure: bool = False) -> ServerSettings:
        _, address = parse_broker(broker)
        assert address is not None
        return ServerSettings(tmp_path, Address.parse(http, "--http"), address, insecure=insecure)

    # of two options that are wrong, the broker of another machine is named first
    advice = "use mqtts" if broker == "mqtt://broker.example" else "give --tls-cert"
    with pytest.raises(ConfigurationError, match=f"without encryption; {advice}"):
        settings()
    assert settings(insecure=True).insecure
