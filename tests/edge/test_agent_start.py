"""Starting and closing: which starts count against a bundle, and what replaces it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.bundles.store import BundleRecord, BundleStore, FileRecord
from edge_sdk.errors import BundleError, ConfigurationError, StateInUseError
from tests.edge.full_disk import read_only

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

LOCAL = AgentSettings(offload=False)


def unproven_starts(state: Path) -> int | None:
    starts: int | None = orjson.loads((state / "active.json").read_bytes())["unproven_starts"]
    return starts


def install_broken(state: Path) -> BundleRecord:
    """Activate a copy of the active bundle with a graph that is no ONNX file."""
    store = BundleStore(state)
    good, slot = store.active().folder, store.inactive_slot()
    store.clear(slot)
    shutil.copytree(good, store.folder(slot), dirs_exist_ok=True)
    (store.folder(slot) / "exit.onnx").write_bytes(b"no graph")
    files = {}
    for path in store.folder(slot).iterdir():
        raw = path.read_bytes()
        files[path.name] = FileRecord(hashlib.sha256(raw).hexdigest(), len(raw))
    record = BundleRecord("digits/1/d2", files)
    store.commit(slot, record)
    return record


def test_a_clean_close_does_not_count_against_the_bundle(fleet: Fleet) -> None:
    state = fleet.device("calm")
    for _ in range(5):
        with EdgeAgent.open(state, LOCAL):
            assert unproven_starts(state) == 1  # a crash from here on would count
        assert unproven_starts(state) == 0


def test_an_agent_starts_and_answers_on_a_read_only_disk(fleet: Fleet, digits: Digits) -> None:
    """FAULTS row 6."""
    state = fleet.device("read-only")
    with EdgeAgent.open(state, LOCAL):
        pass
    with read_only(state), EdgeAgent.open(state, LOCAL) as agent:
        assert agent.predict(digits.x[0]).source == "device"
        with pytest.raises(StateInUseError):
            EdgeAgent.open(state, LOCAL)


def test_an_agent_that_is_not_closed_counts(fleet: Fleet) -> None:
    state = fleet.device("crasher")
    BundleStore(state).count_start()  # and then the process died
    with EdgeAgent.open(state, LOCAL):
        pass
    assert unproven_starts(state) == 1


def test_settings_that_cannot_be_used_do_not_count(fleet: Fleet) -> None:
    state = fleet.device("wrong")
    identity = orjson.loads((state / "agent.json").read_bytes()) | {"ca": "gone.pem"}
    (state / "agent.json").write_bytes(orjson.dumps(identity))
    connection = {"broker": {"url": "mqtts://127.0.0.1:1", "max_packet_bytes": 2_000_000}}
    (state / "connection.json").write_bytes(orjson.dumps(connection))
    with pytest.raises(ConfigurationError, match=r"gone.pem: cannot be used to verify the server"):
        EdgeAgent.open(state)
    assert unproven_starts(state) == 0


def test_a_bundle_that_does_not_load_makes_room_for_the_one_before(
    fleet: Fleet, digits: Digits
) -> None:
    state = fleet.device("before")
    broken = install_broken(state)
    with EdgeAgent.open(state, LOCAL) as agent:
        assert agent.predict(digits.x[0]).label == digits.exit_logits[0].argmax()
    assert BundleStore(state).is_quarantined(broken.digest)


def test_a_bundle_that_does_not_load_and_is_the_only_one_is_named_and_kept(fleet: Fleet) -> None:
    state = fleet.device("only")
    broken = install_broken(state)
    ledger = orjson.loads((state / "active.json").read_bytes())
    ledger["slots"] = {ledger["active"]: ledger["slots"][ledger["active"]]}
    (state / "active.json").write_bytes(orjson.dumps(ledger))
    with pytest.raises(BundleError, match=r"exit.onnx"):
        EdgeAgent.open(state, LOCAL)
    assert not BundleStore(state).is_quarantined(broken.digest)
