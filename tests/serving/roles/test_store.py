"""Models and signed bundles in an S3 bucket: the API writes them, backends elsewhere read them.

The bucket is moto's server on loopback, the registry a real PostgreSQL, the broker a Mosquitto.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import orjson
import pytest
from fastapi.testclient import TestClient
from moto.server import ThreadedMotoServer

from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from server.every_role.query_routes import query_app
from server.registry.location import RegistryLocation
from server.roles.backend import Backend
from server.roles.run import registry_for
from server.services import Services
from server.settings import Role, ServerSettings
from server.signing.artifacts import ArtifactRepository
from server.store.files import StoredFiles
from server.store.index import INDEX_NAME, StoreIndex
from server.store.mirror import StoreMirror
from server.store.upload import StoreUpload
from tests.edge.bundles import crash_states
from tests.edge.bundles.depot import Export
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported
    from tests.serving.postgresql import PostgreSql

pytestmark = pytest.mark.broker

STORE = "s3://splitedge/fleet"
FREE = Address("127.0.0.1", 0)
FOLLOWS_S = 15.0


@pytest.fixture(scope="module")
def bucket() -> Iterator[None]:
    """A local S3 server with one bucket, found by the environment as in production."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="splitedge")
        yield
    server.stop()


@dataclass(frozen=True)
class World:
    """An API and two backends; each has a folder of its own, and they share no disk."""

    api: Services
    backends: list[Backend]

    def versions(self) -> list[str | None]:
        """The version that each backend serves; None while it has none."""
        return [served(backend) for backend in self.backends]


def served(backend: Backend) -> str | None:
    if not backend.models.ready:
        return None
    return backend.models.served("digits").manifest.version


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    bucket: None,
    postgresql: PostgreSql,
    mosquitto: BrokerAddress,
    exported: Exported,
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("store")
    database = postgresql.new_database()
    location = RegistryLocation.parse(postgresql.url(database))

    def settings(name: str, role: Role) -> ServerSettings:
        return ServerSettings(
            folder / name, FREE, mosquitto,
            threads=1, registry=location, artifacts=STORE, role=role,
        )  # fmt: skip

    with contextlib.ExitStack() as stack:
        exported.install(folder / "api" / "models")
        api = Services(settings("api", "api"))
        stack.callback(api.stop)
        api.start()
        backends = []
        for name in ("one", "two"):
            found = registry_for(location, folder / name, settled_elsewhere=True)
            backend = Backend(settings(name, "backend"), found)
            stack.callback(backend.stop)
            backend.start()
            backends.append(backend)
        yield World(api, backends)
    postgresql.drop(database)


@pytest.mark.deadline
def test_backends_serve_what_the_api_wrote_to_the_bucket(world: World, exported: Exported) -> None:
    assert world.versions() == ["1", "1"]
    x = exported.x[3]
    tensor = {
        "name": "x", "datatype": "UINT8", "shape": [1, *x.shape], "data": x.ravel().tolist(),
    }  # fmt: skip
    answers = []
    for backend in world.backends:
        with TestClient(query_app(backend), client=("127.0.0.1", 1)) as client:
            answer = client.post("/v2/models/digits/infer", json={"inputs": [tensor]})
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["outputs"])
    assert answers[0] == answers[1]


@pytest.mark.deadline
def test_any_process_gives_devices_the_signed_bundles(world: World) -> None:
    """The route asks for a login; the folder behind it is the same as the API's."""
    signed = world.api.signed.metadata_folder
    for backend in world.backends:
        copies = {path.name: path.read_bytes() for path in backend.signed.metadata_folder.iterdir()}
        assert copies == {path.name: path.read_bytes() for path in signed.iterdir()}
        targets = sorted(path.name for path in backend.signed.targets_folder.rglob("*.onnx"))
        assert targets == sorted(p.name for p in world.api.signed.targets_folder.rglob("*.onnx"))


@pytest.mark.deadline
def test_backends_elsewhere_follow_a_new_version_a_roll_back_and_a_removal(
    world: World, exported: Exported
) -> None:
    catalogue = world.api.registry.catalogue
    new = exported.install(world.api.settings.state / "models", version=2)
    wait_until(lambda: world.versions() == ["2", "2"], world.versions, FOLLOWS_S)
    catalogue.roll_back("digits")
    wait_until(lambda: world.versions() == ["1", "1"], world.versions, FOLLOWS_S)
    catalogue.remove("digits", 2)
    world.api.artifacts.withdraw("digits", 2)
    shutil.rmtree(new)

    def left() -> list[int]:
        return [len(backend.models.all()) for backend in world.backends]

    wait_until(lambda: left() == [1, 1], left, FOLLOWS_S)
    assert StoredFiles(STORE).read("models/digits/2/model.json") is None


@pytest.mark.deadline
def test_a_model_that_was_changed_in_the_bucket_is_refused_by_the_registry(
    world: World, tmp_path: Path
) -> None:
    """Whoever may write to the bucket, and not to the registry, brings no model to a backend."""
    files = StoredFiles(STORE)
    raw = files.read(INDEX_NAME)
    assert raw is not None
    index = StoreIndex.from_json(raw)
    other = tmp_path / "bad"
    shutil.copytree(world.backends[0].settings.state / "models", other / "models")
    manifest = other / "models" / "digits" / "1" / "model.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    shutil.copytree(world.backends[0].settings.state / "tuf", other / "tuf")
    StoreUpload(StoredFiles(f"{STORE}-bad"), other, lambda: [manifest.parent]).refresh()
    own = tmp_path / "own"
    location = world.backends[0].settings.registry
    assert location is not None
    settings = ServerSettings(
        own, FREE, world.backends[0].settings.broker,
        threads=1, registry=location, artifacts=f"{STORE}-bad", role="backend",
    )  # fmt: skip
    backend = Backend(settings, location)
    try:
        backend.start()
        assert not backend.models.ready
        ((_, why),) = backend.models.broken().items()
        assert "published with other files" in why
    finally:
        backend.stop()
    assert index.models().keys() == {"digits/1"}


def test_an_interrupted_copy_is_taken_up_again(tmp_path: Path, exported: Exported) -> None:
    """On a folder as a store: a file that is missing there stops the copy, and nothing half
    appears."""
    url = f"file://{tmp_path / 'share'}"
    api, own = tmp_path / "api", tmp_path / "own"
    folder = exported.install(api / "models")
    StoreUpload(StoredFiles(url), api, lambda: [folder]).refresh()
    segment = next((tmp_path / "share" / "models").rglob("segments/*"))
    kept = segment.read_bytes()
    segment.write_bytes(b"another content")
    mirror = StoreMirror(StoredFiles(url), own)
    with pytest.raises(StorageError, match="not what the index says"):
        mirror.refresh()
    assert not (own / "models" / "digits" / "1").exists()
    segment.write_bytes(kept)
    mirror.refresh()
    assert (own / "models" / "digits" / "1" / "model.json").exists()


def test_a_file_of_a_model_that_is_damaged_is_copied_again(
    tmp_path: Path, exported: Exported
) -> None:
    """As a power cut leaves it under a release that did not wait for the disk."""
    url = f"file://{tmp_path / 'share'}"
    api, own = tmp_path / "api", tmp_path / "own"
    folder = exported.install(api / "models")
    StoreUpload(StoredFiles(url), api, lambda: [folder]).refresh()
    StoreMirror(StoredFiles(url), own).refresh()
    segment = next((own / "models").rglob("segments/*"))
    whole = segment.read_bytes()
    segment.write_bytes(b"")
    StoreMirror(StoredFiles(url), own).refresh()
    assert segment.read_bytes() == whole
    # one that cannot be read, as on a bad sector, is damaged, too
    segment.unlink()
    segment.mkdir()
    StoreMirror(StoredFiles(url), own).refresh()
    assert segment.read_bytes() == whole


# mirrors a store, of which the URL is given, into the folder
MIRROR = """
from server.store.files import StoredFiles
from server.store.mirror import StoreMirror

(url,) = work
begin()
StoreMirror(StoredFiles(url), state).refresh()
note("done", url)
"""


def test_a_power_cut_leaves_no_torn_file_in_a_copy(tmp_path: Path) -> None:
    """FAULTS row 2: a name that the disk has, without the bytes that it was given before."""
    url = f"file://{tmp_path / 'share'}"
    api, own = tmp_path / "api", tmp_path / "own"
    artifacts = ArtifactRepository(api)
    artifacts.open_or_create()
    model = Export(tmp_path / "exports").write(1)
    artifacts.publish_bundles(model)
    shutil.copytree(model.parent, api / "models" / "tiny")
    StoreUpload(StoredFiles(url), api, lambda: [api / "models" / "tiny" / "1"]).refresh()
    own.mkdir()
    moments = crash_states.record(own, url, act=MIRROR)
    whole = {path: content for path, (_, content) in moments[-1].tree.items()}
    assert {"models/tiny/1/bundles/d2/exit.onnx", "tuf/metadata/timestamp.json"} <= whole.keys()

    def torn(*, synced: bool) -> set[str]:
        states = map(
            crash_states.renamed_without_bytes, crash_states.disks({}, moments, synced=synced)
        )
        named = (item for state in states for item in state.items())
        return {path for path, content in named if path in whole and content != whole[path]}

    assert torn(synced=True) == set()
    assert "models/tiny/1/bundles/d2/exit.onnx" in torn(synced=False)


def test_a_store_that_no_api_has_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="start `splitedge server api`"):
        StoreMirror(StoredFiles(f"file://{tmp_path}"), tmp_path / "own").refresh()


@pytest.mark.parametrize(
    ("url", "told"),
    [("./folder", "file:///"), ("nonsense://bucket", "no such kind of URL")],
)
def test_a_url_that_is_none_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        StoredFiles(url)


@pytest.mark.parametrize(
    "name", ["models/digits/1/../../../etc/passwd", "/etc/passwd", "keys/root.pem", "models/a"]
)
def test_an_index_that_leads_elsewhere_is_refused(name: str) -> None:
    raw = orjson.dumps({"format": 1, "files": {name: 64 * "0"}})
    with pytest.raises(StorageError, match="no file of a server's state"):
        StoreIndex.from_json(raw)
