"""EdgeAgent against torch: which end answers, and with what."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.kept.index import read_index
from edge_sdk.kept.keeper import Keeper
from edge_sdk.manifest import Codec
from edge_sdk.offload.packs import Pack
from edge_sdk.settings import Agreement, Budget, Power
from edge_sdk.settings_file.keep_table import KeepTable

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

Array = NDArray[Any]

# float32 kernels of onnxruntime and torch add in other orders; probabilities are at most 1
TOLERANCE = 1e-4
NEVER_EXIT = -1.0
ALWAYS_EXIT = 100.0


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def entropy(logits: Array) -> float:
    p = softmax(logits.astype(np.float64))
    return float(-(p * np.log(p)).sum())


@pytest.fixture(scope="module")
def state(fleet: Fleet) -> Path:
    return fleet.device("answers")


@pytest.fixture(scope="module")
def hybrid(state: Path, digits: Digits) -> Iterator[EdgeAgent]:
    """An agent with a gate that lets about half of the inputs exit."""
    middle = float(np.median([entropy(row) for row in digits.exit_logits]))
    settings = AgentSettings(threshold=middle, deadline_s=5.0, codec="fp32")
    with EdgeAgent.open(state, settings) as agent:
        yield agent


def alone(digits: Digits, **settings: Any) -> EdgeAgent:
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    return EdgeAgent.from_bundle(folder, AgentSettings(offload=False, **settings))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[0.0]], "a numpy array of float32 (1, 8, 8), got list"),
        (None, "a numpy array of float32 (1, 8, 8), got NoneType"),
        (np.zeros((8, 8), np.float32), "shape (1, 8, 8), got (8, 8)"),
        (np.zeros((1, 1, 8, 8), np.float32), "shape (1, 8, 8), got (1, 1, 8, 8)"),
        (np.zeros((0, 8, 8), np.float32), "shape (1, 8, 8), got (0, 8, 8)"),
        (np.float32(1.0), "a numpy array of float32 (1, 8, 8), got float32"),
        (np.zeros((1, 8, 8)), "dtype float32, got float64; convert it with x.astype('float32')"),
        (np.zeros((1, 8, 8), np.uint8), "dtype float32, got uint8"),
        (np.zeros((1, 8, 8), ">f4"), "dtype float32, got >f4"),
        (np.full((1, 8, 8), np.nan, np.float32), "finite values, got NaN or infinity"),
        (np.full((1, 8, 8), -np.inf, np.float32), "finite values, got NaN or infinity"),
    ],
)
def test_wrong_input_is_refused_by_name_before_anything_runs(
    hybrid: EdgeAgent, x: Any, message: str
) -> None:
    before = hybrid.status()
    with pytest.raises(InputError, match="expected") as refusal:
        hybrid.predict(x)
    assert message in str(refusal.value)
    after = hybrid.status()
    assert (after.counters, after.bytes_up) == (before.counters, before.bytes_up)


@pytest.mark.filterwarnings("error")
def test_huge_but_finite_values_are_no_mistake_of_the_caller(digits: Digits) -> None:
    # the sum of their squares overflows float32, which is how the check finds infinities
    with alone(digits) as agent:
        assert agent.predict(np.full((1, 8, 8), 1e30, np.float32)).source == "device"


def test_views_are_taken_as_they_are(digits: Digits) -> None:
    with alone(digits) as agent:
        x = digits.x[0]
        turned = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
        assert not turned.flags.c_contiguous
        expected, got = agent.predict(x), agent.predict(turned)
        np.testing.assert_array_equal(got.probabilities, expected.probabilities)


def test_exits_and_offloads_equal_torch_at_each_end(hybrid: EdgeAgent, digits: Digits) -> None:
    sources = set()
    for x, exit_logits, logits in zip(digits.x, digits.exit_logits, digits.logits, strict=True):
        answer = hybrid.predict(x)
        expected = exit_logits if answer.source == "device" else logits
        assert answer.label == expected.argmax()
        assert answer.class_name == str(expected.argmax())
        np.testing.assert_allclose(answer.probabilities, softmax(expected), atol=TOLERANCE)
        assert answer.uncertainty == pytest.approx(entropy(exit_logits), abs=TOLERANCE)
        assert (answer.source == "device") == (answer.uncertainty < answer.threshold)
        assert (answer.reason, answer.id) == ("", "")
        sources.add(answer.source)
    assert sources == {"device", "server"}


def single(value: float) -> Any:
    """A number of numpy's that is no float of Python's."""
    return np.float32(value)


def test_numbers_of_numpy_are_those_of_python(digits: Digits, tmp_path: Path) -> None:
    half, idle_w, busy_w = single(0.5), single(2), np.float64(5)
    settings = {"threshold": single(ALWAYS_EXIT), "report_after_s": np.int64(60)}
    with alone(digits, power=Power(idle_w=idle_w, busy_w=busy_w), **settings) as agent:
        keeper = Keeper(tmp_path / "kept", KeepTable(folder=tmp_path / "kept"))
        agent.add_observer(keeper)
        answer = agent.predict(digits.x[0], threshold=half)
        assert agent.correct(answer.id, 3)
        heartbeat = orjson.loads(orjson.dumps(agent.telemetry()))
        status = orjson.loads(orjson.dumps(asdict(agent.status())))
    assert (type(answer.threshold), answer.threshold) == (float, 0.5)
    assert heartbeat["threshold"] == status["threshold"] == ALWAYS_EXIT
    assert [kept.threshold for kept in read_index(tmp_path / "kept")] == [0.5]


def test_a_threshold_that_is_no_number_is_refused(digits: Digits) -> None:
    with alone(digits) as agent:
        wrongs: list[Any] = [math.nan, single(math.nan), "0.5", True]
        for wrong in wrongs:
            with pytest.raises(ConfigurationError, match="threshold: expected a number, got"):
                agent.predict(digits.x[0], threshold=wrong)
            with pytest.raises(ConfigurationError, match="threshold: expected a number, got"):
                agent.predict_many(digits.x[:1], threshold=wrong)
        assert agent.predict(digits.x[0], threshold=math.inf).threshold == math.inf


def test_budgets_and_bounds_of_numpy_s_numbers_are_python_s() -> None:
    budget = Budget(np.float64(0.25), cost=single(2), floor=np.float64("-inf"))
    assert [type(value) for value in (budget.limit, budget.cost, budget.floor)] == [float] * 3
    assert type(Agreement(np.float64(0.05)).delta) is float


def test_without_a_server_the_unsure_answers_are_the_device_s_too(digits: Digits) -> None:
    with alone(digits, threshold=NEVER_EXIT) as agent:
        answer = agent.predict(digits.x[0])
        assert (answer.source, answer.label) == ("device", digits.exit_logits[0].argmax())
        assert agent.status().presence == "no server"


def test_predict_many_keeps_order_and_equals_predict(hybrid: EdgeAgent, digits: Digits) -> None:
    one_by_one = [hybrid.predict(x) for x in digits.x[:100]]
    many = list(hybrid.predict_many(digits.x[:100]))
    assert [answer.label for answer in many] == [answer.label for answer in one_by_one]
    assert [answer.source for answer in many] == [answer.source for answer in one_by_one]
    for got, expected in zip(many, one_by_one, strict=True):
        # the server may run them as one batch, and a batch adds in another order
        np.testing.assert_allclose(got.probabilities, expected.probabilities, atol=TOLERANCE)


@pytest.mark.parametrize("codec", get_args(Codec))
def test_predict_many_equals_predict_with_every_codec(
    fleet: Fleet, digits: Digits, codec: Codec
) -> None:
    settings = AgentSettings(threshold=NEVER_EXIT, deadline_s=5.0, codec=codec)
    with EdgeAgent.open(fleet.device("codecs"), settings) as agent:
        one_by_one = [agent.predict(x) for x in digits.x[:60]]
        before = agent.status().bytes_up
        many = list(agent.predict_many(digits.x[:60]))
        assert agent.status().bytes_up - before == sum(answer.bytes_up for answer in many)
    assert {answer.source for answer in (*one_by_one, *many)} == {"server"}
    # several rows share a header
    assert sum(answer.bytes_up for answer in many) < sum(one.bytes_up for one in one_by_one)
    for got, expected in zip(many, one_by_one, strict=True):
        np.testing.assert_allclose(got.probabilities, expected.probabilities, atol=TOLERANCE)


def test_the_raw_input_is_sent_where_it_is_smaller_and_the_user_allows_it(
    fleet: Fleet, digits: Digits
) -> None:
    """256 values of z in fp16 are 512 bytes; 64 pixels of 0 to 16 are fewer."""
    device, settings = fleet.device("raw"), AgentSettings(threshold=NEVER_EXIT, deadline_s=5.0)
    answers = {}
    for allowed in (False, True):
        chosen = replace(settings, codec="fp16", raw_inputs=allowed)
        with EdgeAgent.open(device, chosen) as agent:
            answers[allowed] = list(agent.predict_many(digits.x[:40]))
    for smashed, raw, logits in zip(answers[False], answers[True], digits.logits[:40], strict=True):
        assert (smashed.source, raw.source) == ("server", "server")
        np.testing.assert_allclose(raw.probabilities, softmax(logits), atol=TOLERANCE)
    assert sum(answer.bytes_up for answer in answers[True]) < 40 * 512
    assert sum(answer.bytes_up for answer in answers[False]) > 40 * 512


def test_predict_many_has_several_queries_under_way(fleet: Fleet, digits: Digits) -> None:
    settings = AgentSettings(threshold=NEVER_EXIT, deadline_s=5.0, max_in_flight=8)
    with EdgeAgent.open(fleet.device("pipelined"), settings) as agent:
        agent.predict(digits.x[0])
        assert agent._offloader is not None
        under_way = agent._offloader._open._open
        seen = []

        def inputs() -> Iterator[Array]:
            for x in digits.x[:64]:
                yield x
                packs = [pack for pack in list(under_way.values()) if isinstance(pack, Pack)]
                seen.append(sum(len(pack.rows) for pack in packs))

        answers = list(agent.predict_many(inputs()))
    assert [answer.source for answer in answers] == ["server"] * 64
    assert 1 < max(seen) <= 8


def test_predict_many_gives_ready_answers_while_the_source_has_no_input(
    fleet: Fleet, digits: Digits
) -> None:
    answered: list[str] = []

    def inputs() -> Iterator[Array | None]:
        yield digits.x[0]
        deadline = time.monotonic() + 10.0
        while not answered and time.monotonic() < deadline:
            yield None
        yield digits.x[1]

    settings = AgentSettings(threshold=NEVER_EXIT, deadline_s=5.0)
    with EdgeAgent.open(fleet.device("slow-source"), settings) as agent:
        stream = agent.predict_many(inputs())
        answered.append(next(stream).source)
        assert agent.status().counters.total == 1  # the second input has not been taken
        answered += [answer.source for answer in stream]
    assert answered == ["server", "server"]


def test_predict_many_gives_the_answers_before_a_bad_input_first(
    hybrid: EdgeAgent, digits: Digits
) -> None:
    inputs = [*digits.x[:10], np.zeros(3, np.float32), digits.x[11]]
    stream = hybrid.predict_many(inputs)
    labels = [next(stream).label for _ in range(10)]
    with pytest.raises(InputError, match=r"expected shape \(1, 8, 8\), got \(3,\)"):
        next(stream)
    assert labels == [hybrid.predict(x).label for x in digits.x[:10]]


def test_a_stream_left_early_leaves_no_query_behind(hybrid: EdgeAgent, digits: Digits) -> None:
    stream = hybrid.predict_many(digits.x)
    next(stream)
    assert hasattr(stream, "close")
    stream.close()
    assert hybrid._offloader is not None
    assert not hybrid._offloader._open


def test_several_threads_get_their_own_answers(hybrid: EdgeAgent, digits: Digits) -> None:
    expected = [hybrid.predict(x).label for x in digits.x]
    before = hybrid.status().counters.total
    with ThreadPoolExecutor(8) as pool:
        labels = list(pool.map(lambda x: hybrid.predict(x).label, digits.x))
    assert labels == expected
    assert hybrid.status().counters.total == before + len(digits.x)


def test_a_frame_above_the_broker_s_limit_goes_over_http(fleet: Fleet, digits: Digits) -> None:
    """FAULTS row 16."""
    settings = AgentSettings(threshold=NEVER_EXIT, deadline_s=5.0, codec="fp32")
    # every query is above 200 bytes, a probe below
    with EdgeAgent.open(fleet.device("narrow", max_packet_bytes=200), settings) as agent:
        answers = list(agent.predict_many(digits.x[:20]))
        names = [thread.name for thread in threading.enumerate()]
    assert [answer.source for answer in answers] == ["server"] * 20
    assert any(name.startswith("splitedge-http") for name in names)
    for answer, logits in zip(answers, digits.logits, strict=False):
        np.testing.assert_allclose(answer.probabilities, softmax(logits), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "packet_bytes"), [("pair", 2_000_000), ("triple", 2_000_000), ("triple", 200)]
)
def test_bundles_of_two_and_three_graphs(
    fleet: Fleet, digits: Digits, model: str, packet_bytes: int
) -> None:
    middle = float(np.median([entropy(row) for row in digits.pair_logits]))
    settings = AgentSettings(threshold=middle, deadline_s=5.0, codec="fp32")
    # above 200 bytes a frame goes over HTTP, where the reply carries the features too
    state = fleet.device(model, f"{model}/1/d2", max_packet_bytes=packet_bytes)
    with EdgeAgent.open(state, settings) as agent:
        answers = list(agent.predict_many(digits.x[:60]))
    for answer, near, far in zip(answers, digits.pair_logits, digits.logits, strict=False):
        expected = near if answer.source == "device" else far
        np.testing.assert_allclose(answer.probabilities, softmax(expected), atol=TOLERANCE)
    assert {answer.source for answer in answers} == {"device", "server"}


def test_a_version_the_server_does_not_have_falls_back_and_says_so(
    hybrid: EdgeAgent, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsure = next(x for x in digits.x if hybrid.predict(x).source == "server")
    target = hybrid._bundle.runner.target
    monkeypatch.setattr(hybrid._bundle.runner, "target", type(target)("digits", "77"))
    answer = hybrid.predict(unsure)
    assert answer.source == "fallback"
    assert "unknown_model" in answer.reason
    assert "77" in answer.reason
    assert hybrid.status().presence == "present"


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), 601.0])
def test_a_deadline_out_of_range_is_refused(
    hybrid: EdgeAgent, digits: Digits, deadline_s: float
) -> None:
    with pytest.raises(ConfigurationError, match="deadline_s: expected a finite number above 0"):
        hybrid.predict(digits.x[0], deadline_s=deadline_s)


def test_settings_that_need_a_server_are_refused_without_one(digits: Digits) -> None:
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    for settings in (AgentSettings(late_answers=True), AgentSettings(controller=Agreement(0.05))):
        with pytest.raises(ConfigurationError, match="need a server"):
            EdgeAgent.from_bundle(folder, settings)
