"""Inputs that a real agent keeps: what was offloaded or corrected, with the right label."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.kept import keeper as keeper_module
from edge_sdk.kept.folder import KeptFolder
from edge_sdk.kept.index import KeptInput, read_index
from edge_sdk.kept.keeper import Keeper
from edge_sdk.manifest import BundleManifest
from edge_sdk.settings_file.keep_table import KeepTable
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fault_proxy import FaultProxy
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

MIDDLE = 0.5  # of the exit head's entropies on these inputs: some exit, some do not


@pytest.fixture(scope="module")
def state(fleet: Fleet) -> Path:
    return fleet.device("keeps")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def agent(state: Path, place: Path) -> Iterator[EdgeAgent]:
    """An agent that keeps inputs."""
    settings = AgentSettings(threshold=MIDDLE, deadline_s=5.0)
    with EdgeAgent.open(state, settings, observers=[Keeper(place, KeepTable())]) as agent:
        yield agent


class BusyFolder(KeptFolder):
    """A folder whose disk takes nothing until it is free."""

    free = threading.Event()

    def put(self, x: Any, manifest: BundleManifest, entry: KeptInput) -> bool:
        assert self.free.wait(10)
        return super().put(x, manifest, entry)


def report(agent: EdgeAgent) -> Any:
    return agent.status().reports["kept"]


def test_offloaded_inputs_are_kept_with_the_server_s_label(
    agent: EdgeAgent, place: Path, digits: Digits
) -> None:
    answers = list(agent.predict_many(digits.x[:40]))
    offloaded = [answer for answer in answers if answer.source == "server"]
    assert 0 < len(offloaded) < 40
    agent.close()
    kept = read_index(place)
    assert [each.id for each in kept] == [answer.id for answer in offloaded]
    assert [each.label for each in kept] == [answer.label for answer in offloaded]
    assert {each.label_from for each in kept} == {"server"}
    assert {each.bundle for each in kept} == {"digits/1/d2"}
    # the exit head's own label is beside it: where they differ, the device was wrong
    rows = [row for row, answer in enumerate(answers) if answer.source == "server"]
    assert [each.device_label for each in kept] == digits.exit_logits[rows].argmax(1).tolist()


def test_a_correction_keeps_an_exit_and_moves_what_is_kept(
    agent: EdgeAgent, place: Path, digits: Digits
) -> None:
    answers = [agent.predict(x) for x in digits.x[:40]]
    exit_row = next(row for row, answer in enumerate(answers) if answer.source == "device")
    hard_row = next(row for row, answer in enumerate(answers) if answer.source == "server")
    assert agent.correct(answers[exit_row].id, 3)
    assert agent.correct(answers[hard_row].id, agent.manifest.class_names[4])
    assert not agent.correct("0" * 32, 3)
    agent.close()
    kept = {each.id: each for each in read_index(place)}
    easy, hard = kept[answers[exit_row].id], kept[answers[hard_row].id]
    assert (easy.label, easy.label_from, easy.source) == (3, "correction", "device")
    assert (hard.label, hard.label_from, hard.source) == (4, "correction", "server")
    from PIL import Image

    pixels = np.asarray(Image.open(place / easy.file))
    np.testing.assert_array_equal(pixels, digits.x[exit_row, 0])
    assert hard.file.startswith("labelled/4/")


def test_without_an_answer_of_the_server_hard_inputs_are_kept_unlabelled(
    fleet: Fleet, place: Path, digits: Digits, proxy: FaultProxy
) -> None:
    state = fleet.device("keeps-alone", broker_port=proxy.port)
    settings = AgentSettings(threshold=-1.0, deadline_s=2.0)
    with EdgeAgent.open(state, settings, observers=[Keeper(place, KeepTable())]) as agent:
        assert agent.predict(digits.x[0]).source == "server"
        proxy.hole()
        answers = [agent.predict(x) for x in digits.x[1:5]]
        proxy.lift()
        assert {answer.source for answer in answers} == {"fallback"}
        assert agent.correct(answers[2].id, 8)
    kept = read_index(place)
    assert [each.label_from for each in kept] == ["server", "", "", "", "correction"]
    assert [each.label for each in kept][1:] == [None, None, None, 8]
    assert len(list((place / "unlabelled").iterdir())) == 3


def test_inputs_keep_their_distance_but_corrections_do_not(
    state: Path, place: Path, digits: Digits
) -> None:
    keeper = Keeper(place, KeepTable(every=3600))
    settings = AgentSettings(threshold=-1.0, deadline_s=5.0)
    with EdgeAgent.open(state, settings, observers=[keeper]) as agent:
        answers = list(agent.predict_many(digits.x[:10]))
        assert agent.correct(answers[5].id, 1)
    assert [each.id for each in read_index(place)] == [answers[0].id, answers[5].id]


def test_a_disk_that_takes_nothing_stops_no_prediction(
    state: Path, place: Path, digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(place, KeepTable())
    (place / "labelled").write_text("a file in the place of the folder")
    settings = AgentSettings(threshold=-1.0, deadline_s=5.0)
    with EdgeAgent.open(state, settings, observers=[keeper]) as agent:
        sources = {answer.source for answer in agent.predict_many(digits.x[:10])}
        wait_until(lambda: report(agent)["dropped"] == 10, lambda: report(agent))
        assert report(agent)["written"] == 0
        (place / "labelled").unlink()
        agent.predict(digits.x[0])
        wait_until(lambda: report(agent)["written"] == 1, lambda: report(agent))
    assert sources == {"server"}
    assert caplog.text.count("inputs are not kept: ") == 1


def test_inputs_faster_than_the_disk_are_dropped_and_counted(
    state: Path, place: Path, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "WAITING_BYTES", 3 * digits.x[0].nbytes)
    monkeypatch.setattr(keeper_module, "KeptFolder", BusyFolder)
    BusyFolder.free.clear()
    keeper = Keeper(place, KeepTable())
    settings = AgentSettings(threshold=-1.0, deadline_s=5.0)
    with EdgeAgent.open(state, settings, observers=[keeper]) as agent:
        list(agent.predict_many(digits.x[:20]))
        BusyFolder.free.set()
        wait_until(lambda: not keeper._waiting, "the disk takes none")
        agent.predict(digits.x[0])
    counts = keeper.report()
    assert counts["written"] + counts["dropped"] == 21
    assert 16 <= counts["dropped"] <= 17  # three wait, and one may be at the disk


def test_another_model_s_inputs_are_not_mixed_in(
    fleet: Fleet, state: Path, place: Path, digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    Keeper(place, KeepTable()).close()
    settings = AgentSettings(threshold=-1.0, deadline_s=5.0)
    with EdgeAgent.open(state, settings, observers=[Keeper(place, KeepTable())]) as agent:
        agent.predict(digits.x[0])
    form = place / "kept.json"
    form.write_text(form.read_text().replace('"float32"', '"uint8"'))
    with EdgeAgent.open(state, settings, observers=[Keeper(place, KeepTable())]) as agent:
        agent.predict(digits.x[0])
        wait_until(lambda: report(agent)["refused"] == 1, lambda: report(agent))
    assert len(read_index(place)) == 1
    assert "it keeps inputs of another model; clear it or name another folder" in caplog.text


def test_an_input_that_fails_in_an_unknown_way_stops_no_other(
    place: Path, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FaultyFolder(KeptFolder):
        def put(self, x: Any, manifest: BundleManifest, entry: KeptInput) -> bool:
            if entry.label == 1:
                raise ArithmeticError("unknown")
            return super().put(x, manifest, entry)

    monkeypatch.setattr(keeper_module, "KeptFolder", FaultyFolder)
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    with EdgeAgent.from_bundle(folder, observers=[Keeper(place, KeepTable())]) as agent:
        for label in (1, 2):
            assert agent.correct(agent.predict(digits.x[0]).id, label)
        wait_until(lambda: report(agent)["written"] == 1, lambda: report(agent))
        assert report(agent)["dropped"] == 1
