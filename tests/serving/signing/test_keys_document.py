"""What docs/keys.md says to type, typed: only ports and the place of the USB stick are put in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.http

from edge_sdk import api
from edge_sdk.bundles import lifecycle
from edge_sdk.bundles.store import BundleStore
from profiles.reference import load_reference
from tests.reader import Document, Reader, started_server

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

PAGE = Document("docs/keys.md")
TOKEN = " &\nsplitedge server token create --state server"
FIRST = f"splitedge server run --state server{TOKEN}"
STICK = "/media/usb/root"

Typed = Callable[[str], str]


@pytest.fixture
def block(tmp_path: Path) -> Typed:
    """A block of the page by its name, with a folder of this test for the USB stick."""
    return lambda name: PAGE.snippet(name).strip().replace(STICK, str(tmp_path / "usb"))


def asked(reader: Reader) -> int:
    """The label that an unmodified v2 client gets from the reader's server."""
    client = tritonclient.http.InferenceServerClient(reader.http.removeprefix("http://"))
    x = tritonclient.http.InferInput("x", [1, 1, 8, 8], "UINT8")
    x.set_data_from_numpy(np.zeros((1, 1, 8, 8), np.uint8))
    return int(client.infer("digits", [x]).as_numpy("label")[0])


def test_a_root_in_the_state_is_shown_rotated_moved_and_encrypted(
    exported: Exported, tmp_path: Path, block: Typed
) -> None:
    """A device and a v2 client go on with each change, as the page says."""
    exported.install(tmp_path / "server" / "models")
    device = tmp_path / "device"
    with started_server(tmp_path, FIRST) as reader:
        profile = load_reference("raspberry-pi-4")
        api.enroll(reader.http, reader.token, device, profile=profile, name="pi")
        lifecycle.update(device)
        before = asked(reader)
        assert "timestamp" in reader.shell(block("show"))
    stopped = Reader(tmp_path)
    assert "new keys: timestamp, snapshot, targets" in stopped.shell(block("rotate"))
    stopped.shell(block("move"))
    assert len(list((tmp_path / "usb").glob("*.pem"))) == 3
    assert not (tmp_path / "server" / "keys" / "root.pem").exists()
    assert "new keys" in stopped.shell(block("rotate-offline"))
    stopped.shell(block("encrypt"))
    assert b"ENCRYPTED" in (tmp_path / "server" / "keys" / "targets.pem").read_bytes()
    with started_server(tmp_path, block("encrypted") + TOKEN) as reader:
        assert asked(reader) == before
        moved = tmp_path / "device" / "agent.json"
        moved.write_text(moved.read_text().replace(_url(moved), reader.http))
        lifecycle.update(device)  # over all roots that it missed
        assert BundleStore(device).active().manifest.model == "digits"


def test_a_root_outside_the_server_from_the_first_start(
    exported: Exported, tmp_path: Path, block: Typed
) -> None:
    exported.install(tmp_path / "server" / "models")
    # a token made before the server's keys would make them, with the root's in the state
    made = " &\nuntil test -f server/keys/timestamp.pem; do sleep 0.1; done"
    with started_server(tmp_path, block("offline") + made + TOKEN.removeprefix(" &")) as reader:
        assert len(list((tmp_path / "usb").glob("*.pem"))) == 3
        assert not (tmp_path / "server" / "keys" / "root.pem").exists()
        assert asked(reader) in range(10)
        # the folder may be away from then on
        shutil.move(tmp_path / "usb", tmp_path / "drawer")
        assert asked(reader) in range(10)
        assert "root" in reader.shell(block("show"))


def _url(identity: Path) -> str:
    """The server's URL in a device's identity: a second server of a test has another port."""
    return str(json.loads(identity.read_text())["server"])
