"""Learning in a running agent: corrections, a real server's answers, restarts, other bundles."""

from __future__ import annotations

import logging
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.answers.observer import Answered
from edge_sdk.answers.prediction import DEVICE
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.errors import ConfigurationError
from edge_sdk.gate.gate import Decision
from edge_sdk.learning.kept_head import FILE
from edge_sdk.learning.learner import ANCHOR_EVERY, QUEUE_MOST, TURNS_AT_ONCE, HeadLearner
from edge_sdk.manifest import BundleManifest
from edge_sdk.settings import Learn
from edge_sdk.settings_file.settings_file import SettingsFile
from edge_sdk.training.data.load import load_dataset
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

NEVER_EXIT, ALWAYS_EXIT = -1.0, 100.0
TAUGHT = 144
# a row is lit, or not: what the network never saw
LIGHT = np.linspace(0.2, 1.4, 8, dtype=np.float32)[:, None]


def stream() -> tuple[NDArray[Any], NDArray[Any]]:
    """The digits that the network was not trained on, in another light."""
    data = load_dataset("digits").head(600, 200)
    return data.x_test * LIGHT, data.y_test


def bundle(digits: Digits, name: str = "digits") -> Path:
    return digits.models / name / "1" / "bundles" / "d2"


def learner(digits: Digits, state: Path | None = None, **settings: Any) -> HeadLearner:
    """Learns from corrections of a bundle that no agent runs."""
    folder = bundle(digits)
    runner = BundleRunner(folder, BundleManifest.load(folder), AgentSettings(offload=False))
    return HeadLearner(Learn(**settings), lambda: runner, state)


def correct(own: HeadLearner, x: NDArray[Any], label: int) -> None:
    runner = own._running()
    decision, z, _ = runner.exit(x)
    prediction: Any = None
    own.corrected(Answered(prediction, decision, runner.manifest, None, z), label)


def answers(own: HeadLearner, x: NDArray[Any]) -> NDArray[Any]:
    return np.array([own._running().exit(each)[0].label for each in x])


def taught(own: HeadLearner, x: NDArray[Any], y: NDArray[Any]) -> None:
    for start in range(0, len(x), QUEUE_MOST):
        for each, label in zip(
            x[start : start + QUEUE_MOST], y[start : start + QUEUE_MOST], strict=True
        ):
            correct(own, each, int(label))
        own.learn_now()
    for _ in range(6):
        own.learn_now()


def turns_of(agent: EdgeAgent) -> int:
    return int(agent.status().reports["learning"]["turns"])


def await_turns(agent: EdgeAgent, before: int) -> None:
    """Wait until the thread has learnt from what came after the turns `before`."""
    wait_until(lambda: turns_of(agent) >= before + TURNS_AT_ONCE, "turns of learning")


@pytest.mark.deadline
def test_corrections_improve_the_answers_of_a_running_agent(digits: Digits) -> None:
    x, y = stream()
    settings = AgentSettings(offload=False, learn=Learn("corrections"))
    with EdgeAgent.from_bundle(bundle(digits), settings) as agent:
        before = [agent.predict(each).label for each in x[TAUGHT:]]
        for start in range(0, TAUGHT, 48):
            turns = turns_of(agent)
            for each, label in zip(x[start:][:48], y[start:][:48], strict=True):
                assert agent.correct(agent.predict(each).id, int(label))
            await_turns(agent, turns)
        after = [agent.predict(each).label for each in x[TAUGHT:]]
        report = agent.status().reports["learning"]
        assert report["active"]
        assert report["corrections"] == TAUGHT
        assert report["learnt_accuracy"] > report["bundle_accuracy"]
        assert np.mean(after == y[TAUGHT:]) > np.mean(before == y[TAUGHT:])


@pytest.mark.deadline
def test_a_servers_answers_teach_a_device_that_keeps_it_over_a_restart(
    digits: Digits, fleet: Fleet
) -> None:
    import torch

    state = fleet.device("learns")
    x, _ = stream()
    with torch.no_grad():
        expected = digits.net(torch.from_numpy(x)).argmax(1).numpy()
    base = [EdgeAgent.from_bundle(bundle(digits)).predict(each).label for each in x[TAUGHT:]]
    learn = AgentSettings(threshold=NEVER_EXIT, deadline_s=20.0, learn=Learn("server"))
    with EdgeAgent.open(state, learn) as agent:
        for start in range(0, TAUGHT, 48):
            turns = turns_of(agent)
            for each in agent.predict_many(x[start:][:48]):
                assert each.source == "server"
            await_turns(agent, turns)
        with pytest.raises(ConfigurationError, match="nothing here takes corrections"):
            agent.correct("any", 1)
    assert (state / FILE).stat().st_mode & 0o777 == 0o600
    again = AgentSettings(threshold=ALWAYS_EXIT, learn=Learn("server"))
    with EdgeAgent.open(state, again) as agent:
        report = agent.status().reports["learning"]
        assert report["active"]
        assert report["learnt"] == TAUGHT * 3 // 4
        after = [agent.predict(each).label for each in x[TAUGHT:]]
    assert np.mean(after == expected[TAUGHT:]) > np.mean(base == expected[TAUGHT:])


def test_a_learnt_head_belongs_to_its_bundle(digits: Digits, tmp_path: Path) -> None:
    x, y = stream()
    first = learner(digits, tmp_path)
    taught(first, x[:TAUGHT], (y[:TAUGHT] + 3) % 10)
    first.close()
    kept = (tmp_path / FILE).read_bytes()
    second = learner(digits, tmp_path)
    assert answers(second, x).tolist() == answers(first, x).tolist()
    second.close()

    copied = tmp_path / "other"
    shutil.copytree(bundle(digits), copied)
    manifest = (copied / "manifest.json").read_bytes()
    (copied / "manifest.json").write_bytes(manifest.replace(b"digits/1/d2", b"digits/2/d2"))
    runner = BundleRunner(copied, BundleManifest.load(copied), AgentSettings(offload=False))
    other = HeadLearner(Learn(), lambda: runner, tmp_path)
    assert not other.report()["active"]
    other.close()
    assert (tmp_path / FILE).read_bytes() == kept  # nothing was learnt that could take its place


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"x" * 400])
def test_a_damaged_file_is_told_and_learning_starts_anew(
    content: bytes, digits: Digits, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_bytes(content)
    own = learner(digits, tmp_path)
    assert "learning starts anew" in caplog.text
    assert not own.report()["active"]
    own.close()


def test_learning_follows_the_agent_to_another_bundle(digits: Digits) -> None:
    x, y = stream()
    folder = bundle(digits)
    manifest = BundleManifest.load(folder)
    runners = [BundleRunner(folder, manifest, AgentSettings(offload=False)) for _ in range(2)]
    current = [runners[0]]
    own = HeadLearner(Learn(), lambda: current[0])
    taught(own, x[:TAUGHT], (y[:TAUGHT] + 3) % 10)
    assert own.report()["active"]
    late = runners[0].exit(x[0])[1]
    current[0] = BundleRunner(folder, BundleManifest.load(folder), AgentSettings(offload=False))
    decision = runners[1].exit(x[0])[0]
    prediction: Any = None
    own.corrected(Answered(prediction, decision, manifest, None, late), 1)  # of the bundle before
    own.learn_now()
    assert own.report()["learnt"] == 0
    assert not own.report()["active"]
    own.close()


def test_a_drop_is_told_in_the_log_and_the_status(
    digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = stream()
    own = learner(digits)
    taught(own, x[:TAUGHT], y[:TAUGHT])
    learnt = own._subject.own
    assert learnt is not None
    for each in learnt.learnt:
        each.target[:] = np.roll(each.target, 1)  # wrong labels, but not of the held-out samples
    for _ in range(3):
        own.learn_now()
    assert own.report()["drops"] >= 1
    assert not own.report()["active"]
    assert "learning: dropped:" in caplog.text
    fresh = learner(digits)
    assert answers(own, x).tolist() == answers(fresh, x).tolist()
    own.close()
    fresh.close()


def test_a_bundle_whose_exit_is_a_model_of_its_own_says_why_it_does_not_learn(
    digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    settings = AgentSettings(offload=False, learn=Learn())
    with EdgeAgent.from_bundle(bundle(digits, "pair"), settings) as agent:
        report = agent.status().reports["learning"]
    assert "its exit is a model of its own" in report["why_not"]
    assert "its exit is a model of its own" in caplog.text


def test_the_queue_is_bounded_and_what_is_left_out_is_counted(digits: Digits) -> None:
    x, y = stream()
    own = learner(digits)
    with own._working:  # the thread can take nothing
        for place in range(QUEUE_MOST + 5):
            correct(own, x[place], int(y[place]))
        assert len(own._labelled) <= QUEUE_MOST
    own.learn_now()
    assert own.report()["left_out"] >= 4  # the thread may have taken one before
    own.close()


def test_an_answer_costs_no_learning_in_the_callers_thread(digits: Digits) -> None:
    """`answered` puts z into a queue, and computes nothing from it."""
    own = learner(digits)
    runner = own._running()

    class Unreadable:
        nbytes = 4

        def __getattr__(self, name: str) -> Any:
            raise AssertionError("z was read in the thread of predict")

    decision = Decision(False, 1, np.full(10, 0.1, np.float32), 1.0, 0.5)
    prediction: Any = type("P", (), {"source": "server", "probabilities": decision.probabilities})
    z: Any = Unreadable()
    with own._working:
        own.answered(Answered(prediction, decision, runner.manifest, None, z))
        own._labelled.clear()
    own.close()


def test_settings_of_learning_come_from_the_file(caplog: pytest.LogCaptureFixture) -> None:
    assert SettingsFile.from_toml(b"[learn]\n").agent.learn is None
    learn = SettingsFile.from_toml(b'[learn]\nlabels = "server"\nrate = 0.5\n').agent.learn
    assert learn == Learn("server", rate=0.5)
    with pytest.raises(ConfigurationError, match=r"\[learn\]: labels: expected one of corrections"):
        SettingsFile.from_toml(b'[learn]\nlabels = "mine"\n')
    with pytest.raises(ConfigurationError, match="learn from the server needs offload"):
        AgentSettings(offload=False, learn=Learn("server"))


@pytest.mark.deadline
def test_the_thread_learns_after_eight_labels_and_ends_with_the_agent(
    digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x, y = stream()
    own = learner(digits)
    for place in range(8):
        correct(own, x[place], int(y[place]))
    wait_until(lambda: own.report()["turns"] > 0, "a turn of learning")
    own.close()
    assert not own._thread.is_alive()


def test_what_waits_is_bounded_in_bytes(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = stream()
    own = learner(digits)
    runner = own._running()
    decision, z, _ = runner.exit(x[0])
    assert z is not None
    monkeypatch.setattr("edge_sdk.learning.learner.QUEUE_BYTES", 3 * z.nbytes)
    prediction: Any = SimpleNamespace(source=DEVICE)
    with own._working:  # the thread takes nothing
        for _ in range(10 * ANCHOR_EVERY):
            own.answered(Answered(prediction, decision, runner.manifest, None, z))
        assert len(own._own) == 3
        for _ in range(10):
            correct(own, x[0], 1)
        assert len(own._labelled) == 3
    own.close()


@pytest.mark.deadline
def test_a_bundle_that_was_replaced_is_let_go_without_a_label(
    digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_sdk.learning.learner.LOOK_S", 0.05)
    x, _ = stream()
    folder, settings = bundle(digits), AgentSettings(offload=False)
    running = [BundleRunner(folder, BundleManifest.load(folder), settings)]
    own = HeadLearner(Learn(), lambda: running[0])
    prediction: Any = SimpleNamespace(source=DEVICE)
    decision, z, _ = running[0].exit(x[0])
    for _ in range(ANCHOR_EVERY):
        own.answered(Answered(prediction, decision, running[0].manifest, None, z))
    before = weakref.ref(running[0])
    running[0] = BundleRunner(folder, BundleManifest.load(folder), settings)
    wait_until(lambda: before() is None, "the replaced bundle keeps its memory")
    own.close()
