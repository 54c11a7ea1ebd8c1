"""`splitedge agent …` against a real server, with the files that people have."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from edge_sdk.agent import EdgeAgent
from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.bundles.store import BundleStore
from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.manifest import BundleManifest, TensorSpec
from edge_sdk.nets import build
from edge_sdk.pipeline.samples import read_samples
from edge_sdk.session import Array
from edge_sdk.training.device.background import BackgroundTraining, check_data
from edge_sdk.wire.address import Address
from server.bench.models import export_random
from server.processes import ServerProcess
from server.tokens import create_token
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.trainer import train
from server.training.recipe.recipe import read_recipe
from tests.commands import Splitedge
from tests.waiting import wait_until

SPEC = TensorSpec("float32", (1, 8, 8))
SAMPLES: Array = np.random.default_rng(7).integers(0, 17, (5, 1, 8, 8)).astype(np.float32)
NEVER = ("--threshold", "-1")  # below every entropy: nothing exits on the device
PROFILE = ("--profile", "raspberry-pi-4")  # measuring takes seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL and state folder of a server with one model, of random weights."""
    torch.set_num_threads(1)
    state = tmp_path_factory.mktemp("served") / "server"
    export_random("tiny", SPEC.shape, (2,), state / "models")
    process = ServerProcess(state)
    process.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    yield process.http, state
    process.stop()


@pytest.fixture(scope="module")
def enrolment(
    server: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], str]:
    """An enrolled state folder, what enrolling printed, and its token."""
    http, state = server
    pi, token = tmp_path_factory.mktemp("devices") / "pi", create_token(state)
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "enroll", "--server", http]
    command += ["--token", token, "--state", str(pi), "--name", "pi-1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return pi, json.loads(done.stdout), token


@pytest.fixture(scope="module")
def pi(enrolment: tuple[Path, dict[str, Any], str]) -> Path:
    """The state folder of an enrolled device."""
    return enrolment[0]


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], list[int]]:
    """Labels of SAMPLES by torch: the exit head's and the whole network's."""
    net = build("tiny", input_shape=SPEC.shape, classes=10, seed=0).eval()
    with torch.inference_mode():
        exits, final = net.forward_exits(torch.from_numpy(SAMPLES))
    return exits[2].argmax(1).tolist(), final.argmax(1).tolist()


def test_enrolling_measures_the_device_and_fetches_its_bundle(
    enrolment: tuple[Path, dict[str, Any], str], server: tuple[str, Path], splitedge: Splitedge
) -> None:
    pi, output, _ = enrolment
    assert output == {"device": "pi-1", "fleet": "default", "bundle": "bench-tiny/1/d2"}
    status = splitedge("agent", "status", "--state", pi, "--json").json
    assert (status["device"], status["server"], status["depth"]) == ("pi-1", server[0], 2)
    assert status["server_answers"] is True
    (listed,) = splitedge("server", "devices", "--state", server[1], "--json").json
    assert (listed["device"], listed["bundle"]) == ("pi-1", "bench-tiny/1/d2")


@pytest.mark.parametrize(
    ("array", "names"),
    [
        (SAMPLES[0], [""]),
        (SAMPLES[0, 0], [""]),  # without the channel axis
        (SAMPLES, ["[0]", "[1]", "[2]", "[3]", "[4]"]),
        (SAMPLES[:, 0], ["[0]", "[1]", "[2]", "[3]", "[4]"]),
        (SAMPLES[:1], ["[0]"]),
        (SAMPLES.astype(np.float64), ["[0]", "[1]", "[2]", "[3]", "[4]"]),
        (SAMPLES.astype(np.uint8), ["[0]", "[1]", "[2]", "[3]", "[4]"]),
    ],
)
def test_arrays_are_classified_as_torch_does(
    array: Array,
    names: list[str],
    pi: Path,
    tmp_path: Path,
    expected: tuple[list[int], list[int]],
    splitedge: Splitedge,
) -> None:
    file = tmp_path / "x.npy"
    np.save(file, array)
    rows = splitedge("agent", "predict", file, "--state", pi, "--local", "--json").json
    assert [row["input"] for row in rows] == [f"{file}{name}" for name in names]
    assert [row["label"] for row in rows] == expected[0][: len(names)]
    assert {row["source"] for row in rows} == {"device"}
    assert sum(rows[0]["probabilities"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.deadline
def test_server_answers_what_the_device_is_not_sure_of(
    pi: Path, tmp_path: Path, expected: tuple[list[int], list[int]], splitedge: Splitedge
) -> None:
    one, many = tmp_path / "one.npy", tmp_path / "many.npy"
    np.save(one, SAMPLES[0])
    np.save(many, SAMPLES[1:])
    rows = splitedge("agent", "predict", one, many, "--state", pi, *NEVER, "--json").json
    assert [row["source"] for row in rows] == ["server"] * 5
    assert [row["label"] for row in rows] == expected[1]


def test_settings_file_holds_where_no_option_is_given(
    pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    file = tmp_path / "x.npy"
    np.save(file, SAMPLES[0])
    predict = ("agent", "predict", file, "--state", pi, "--json")
    settings = pi / "agent.toml"
    template = settings.read_text()
    try:
        # nothing exits, and the server is not asked
        set_ = template.replace("#threshold = 0.5", "threshold = -1")
        settings.write_text(set_.replace("#offload = true", "offload = false"))
        (row,) = splitedge(*predict).json
        assert (row["source"], row["threshold"]) == ("device", -1)
        assert splitedge(*predict, "--threshold", 0.25).json[0]["threshold"] == 0.25
        settings.write_text(template.replace("#threads = 1", "threads = 0"))
        refusal = splitedge(*predict).refusal
        assert f"{settings}: [agent]: threads: expected a whole number from 1" in refusal
    finally:
        settings.write_text(template)


@pytest.mark.parametrize("channels", [1, 3])
def test_image_is_taken_at_its_own_values(
    channels: int, pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    pixels = SAMPLES[0, 0].astype(np.uint8)
    png, npy = tmp_path / "x.png", tmp_path / "x.npy"
    # grey in three channels is the same grey: 0.299 + 0.587 + 0.114 = 1
    Image.fromarray(pixels if channels == 1 else np.stack([pixels] * 3, -1)).save(png)
    np.save(npy, SAMPLES[0])
    rows = splitedge("agent", "predict", png, npy, "--state", pi, "--local", "--json").json
    assert rows[0]["probabilities"] == rows[1]["probabilities"]


def test_image_of_another_size_is_resized(pi: Path, tmp_path: Path, splitedge: Splitedge) -> None:
    file = tmp_path / "photo.jpg"
    Image.effect_noise((120, 80), 50).save(file)
    called = splitedge("agent", "predict", file, file, "--state", pi, "--local", "--json")
    assert called.json[0]["class_name"] == str(called.json[0]["label"])
    told = "was resized from 120 x 80 to 8 x 8, as the model takes it (and 1 more)"
    assert called.err == f"note: {file} {told}\n"


def test_table_names_each_sample(pi: Path, tmp_path: Path, splitedge: Splitedge) -> None:
    file = tmp_path / f"{'long-' * 12}name.npy"
    np.save(file, SAMPLES[:2])
    shown = splitedge("agent", "predict", file, "--state", pi, "--local")
    assert shown.status == 0
    assert f"{file.name}[1]" in shown.out  # in a pipe nothing is cut
    assert "uncertainty" in shown.out
    assert shown.out.count("device") == 2


class Canary:
    """Unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def saved(array: Any) -> bytes:
    raw = io.BytesIO()
    np.save(raw, array)
    return raw.getvalue()


def zipped() -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("x.npy", saved(SAMPLES))
    return raw.getvalue()


# a header that declares 8 TB, and nothing behind it
HUGE = saved(np.zeros(1, np.float64)).replace(b"(1,), ", b"(1000000000000,), ", 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("junk.npy", b"junk", "not a readable .npy file"),
        ("empty.npy", b"", "not a readable .npy file"),
        ("short.npy", saved(SAMPLES)[:-1], "not a readable .npy file"),
        ("huge.npy", HUGE, "not a readable .npy file"),
        ("archive.npy", zipped(), "expected one array, got NpzFile"),
        ("wrong.npy", saved(np.zeros((3, 28, 28))), "got (3, 28, 28)"),
        ("number.npy", saved(np.float32(1)), "got ()"),
        ("none.npy", saved(SAMPLES[:0]), "expected at least one sample"),
        ("nan.npy", saved(SAMPLES * np.nan), "expected finite float32 values"),
        ("big.npy", saved(np.full((8, 8), 1e300)), "expected finite float32 values"),
        ("words.npy", saved(np.full((8, 8), "a")), "expected numbers"),
        ("junk.png", b"junk", "not a readable image"),
        ("notes.txt", b"seven", "not a readable image"),
    ],
)
def test_file_that_is_no_input_is_refused_in_one_line(
    name: str, content: bytes, message: str, pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    refusal = splitedge("agent", "predict", file, "--state", pi, "--json").refusal
    assert str(file) in refusal
    assert message in refusal


@pytest.mark.parametrize("name", ["missing.npy", "missing.png", "folder.npy", "folder"])
def test_no_file_is_refused_in_one_line(
    name: str, pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    assert name in splitedge("agent", "predict", tmp_path / name, "--state", pi).refusal


def test_pickle_is_refused_and_never_run(pi: Path, tmp_path: Path, splitedge: Splitedge) -> None:
    """FAULTS row 29."""
    touched = tmp_path / "touched"
    objects = np.empty(1, object)
    objects[0] = Canary(touched)
    files = [tmp_path / "bare.npy", tmp_path / "objects.npy"]
    files[0].write_bytes(pickle.dumps(Canary(touched)))
    np.save(files[1], objects, allow_pickle=True)
    for file in files:
        refusal = splitedge("agent", "predict", file, "--state", pi).refusal
        assert "not a readable .npy file" in refusal
    assert not touched.exists()


def test_no_damage_to_a_file_escapes_as_another_error(tmp_path: Path) -> None:
    png = io.BytesIO()
    Image.fromarray(SAMPLES[0, 0].astype(np.uint8)).save(png, "png")
    for name, good in (("x.npy", saved(SAMPLES[0])), ("x.png", png.getvalue())):
        file = tmp_path / name
        refusals = []
        for at in range(min(len(good), 140)):
            for flip in (0x01, 0x20, 0x80):
                file.write_bytes(good[:at] + bytes((good[at] ^ flip,)) + good[at + 1 :])
                try:
                    list(read_samples(file, SPEC))
                except InputError as err:
                    refusals.append(str(err))
        assert len(refusals) > 50
        assert all(text.startswith(f"{file}: ") and "\n" not in text for text in refusals)


def test_unknown_and_used_tokens_are_refused(
    enrolment: tuple[Path, dict[str, Any], str],
    server: tuple[str, Path],
    tmp_path: Path,
    splitedge: Splitedge,
) -> None:
    enroll = ("agent", "enroll", "--server", server[0], "--state", tmp_path / "pi", *PROFILE)
    for token in ("nonsense", enrolment[2]):
        assert "token" in splitedge(*enroll, "--token", token).refusal
    assert not (tmp_path / "pi").exists()


def test_token_of_another_fleet_is_refused_and_leaves_nothing(
    server: tuple[str, Path], tmp_path: Path, splitedge: Splitedge
) -> None:
    token, _, root = create_token(server[1]).partition(".")
    other = f"{token}.{root[::-1]}"
    enroll = ("agent", "enroll", "--server", server[0], "--state", tmp_path / "pi", *PROFILE)
    assert "root key" in splitedge(*enroll, "--token", other).refusal
    assert not (tmp_path / "pi" / "agent.json").exists()


def test_server_that_is_not_there_is_told(
    free_port: int, tmp_path: Path, splitedge: Splitedge
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    enroll = ("agent", "enroll", "--token", "t", "--state", tmp_path / "pi", *PROFILE)
    refusal = splitedge(*enroll, "--server", url).refusal
    assert url in refusal
    assert "is the server running?" in refusal
    assert not (tmp_path / "pi").exists()


def test_address_without_a_scheme_is_refused_before_the_token_is_spent(
    server: tuple[str, Path], tmp_path: Path, splitedge: Splitedge
) -> None:
    http, state = server
    token = create_token(state)
    enroll = ("agent", "enroll", "--token", token, "--state", tmp_path / "pi", *PROFILE, "--json")
    for wrong in (http.removeprefix("http://"), "pi-server", http.replace("http", "ftp")):
        refusal = splitedge(*enroll, "--server", wrong).refusal
        assert "expected http(s)://HOST[:PORT]" in refusal
    assert splitedge(*enroll, "--server", http).json["bundle"] == "bench-tiny/1/d2"


def test_status_tells_the_server_from_its_broker(
    pi: Path, server: tuple[str, Path], free_port: int, tmp_path: Path, splitedge: Splitedge
) -> None:
    def status() -> dict[str, Any]:
        fields: dict[str, Any] = splitedge("agent", "status", "--state", copy, "--json").json
        return fields

    copy = tmp_path / "pi"
    shutil.copytree(pi, copy, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
    well = status()
    assert (well["server_answers"], well["broker_answers"]) == (True, True)
    table = splitedge("agent", "status", "--state", copy).out
    rows = dict(re.findall(r"│ (\S.*?) +│ (\S.*?) +│", table))
    assert (rows["server answers"], rows["agent"]) == ("yes", "does not run")

    # the API answers, and the broker does not: it is stopped for a moment
    addresses = json.loads((server[1] / "addresses.json").read_text())
    (broker,) = listening_at(int(addresses["mqtt"].rpartition(":")[2]))
    broker.suspend()
    try:
        silent = status()
    finally:
        broker.resume()
    assert (silent["server_answers"], silent["broker_answers"]) == (True, False)
    assert silent["broker_why_not"].startswith(f"no broker at {well['broker']} after 3 s")

    # the broker answers, and the API does not
    identity = json.loads((copy / "agent.json").read_text())
    elsewhere = identity | {"server": f"http://127.0.0.1:{free_port}"}
    (copy / "agent.json").write_text(json.dumps(elsewhere))
    away = status()
    assert (away["server_answers"], away["broker_answers"]) == (False, True)
    assert "is the server running?" in away["why_not"]

    # a credential that was replaced: the broker says no, and is there
    wrong = identity | {"credential": identity["credential"][::-1]}
    (copy / "agent.json").write_text(json.dumps(wrong))
    refused = status()
    assert (refused["server_answers"], refused["broker_answers"]) == (False, False)
    assert "Not authorized" in refused["broker_why_not"]


@pytest.mark.deadline
def test_asking_for_the_broker_leaves_a_running_agent_its_connection(
    pi: Path, splitedge: Splitedge
) -> None:
    with EdgeAgent.open(pi) as agent:
        wait_until(lambda: agent.predict(SAMPLES[0], threshold=-1.0).source == "server", lambda: "")
        assert splitedge("agent", "status", "--state", pi, "--json").json["broker_answers"]
        assert agent.predict(SAMPLES[0], threshold=-1.0).source == "server"
        assert agent.status().why_away == ""


def listening_at(port: int) -> list[psutil.Process]:
    """The processes that listen at a port of this machine."""
    return [
        psutil.Process(each.pid)
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.pid and each.laddr and each.laddr.port == port
    ]


@pytest.mark.parametrize("command", [("predict", "x.npy"), ("run",), ("status",), ("update",)])
def test_device_that_is_not_enrolled_is_told_how(
    command: tuple[str, ...], tmp_path: Path, splitedge: Splitedge
) -> None:
    refusal = splitedge("agent", *command, "--state", tmp_path / "pi").refusal
    assert "`splitedge agent enroll`" in refusal
    assert not (tmp_path / "pi").exists()


def test_device_is_enrolled_once(pi: Path, server: tuple[str, Path], splitedge: Splitedge) -> None:
    before = (pi / "agent.json").read_bytes()
    enroll = ("agent", "enroll", "--server", server[0], "--token", "t", "--state", pi)
    refusal = splitedge(*enroll).refusal
    assert "enrolled there already; to go on with it, run `splitedge agent update`" in refusal
    assert (pi / "agent.json").read_bytes() == before


def test_update_fetches_what_is_assigned_and_says_it(pi: Path, splitedge: Splitedge) -> None:
    kept = (pi / "active.json").read_bytes()
    (pi / "active.json").unlink()
    output = splitedge("agent", "update", "--state", pi, "--json").json
    assert output == {"device": "pi-1", "bundle": "bench-tiny/1/d2"}
    assert (
        json.loads(kept)["slots"].items()
        <= json.loads((pi / "active.json").read_text())["slots"].items()
    )
    assert "pi-1: bench-tiny/1/d2" in splitedge("agent", "update", "--state", pi).out


@pytest.mark.deadline
def test_running_agent_keeps_its_state_to_itself_and_ends_well(
    pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    file = tmp_path / "x.npy"
    np.save(file, SAMPLES)
    predict = ("agent", "predict", file, "--state", pi, "--json")
    alone = splitedge(*predict, "--local").json
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "run", "--state", str(pi)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert "pi-1 runs bench-tiny/1/d2" in run.stdout.readline()
        # the running agent answers for it
        asked = splitedge(*predict, "--local").json
        assert [(row["input"], row["probabilities"]) for row in asked] == [
            (row["input"], row["probabilities"]) for row in alone
        ]
        assert {row["source"] for row in splitedge(*predict, *NEVER, "--deadline", 10).json} == {
            "server"
        }
        status = splitedge("agent", "status", "--state", pi, "--json").json["agent"]
        assert (status["pid"], status["counters"]["device"]) == (run.pid, 5)
        assert status["counters"]["server"] == 5
        update = splitedge("agent", "update", "--state", pi, "--json").json
        assert update == {"device": "pi-1", "bundle": "bench-tiny/1/d2"}
        # settings of the agent as a whole, and a second agent, are refused
        assert "--threads: an agent runs here" in splitedge(*predict, "--threads", 2).refusal
        second = splitedge("agent", "run", "--state", pi).refusal
        assert f"process {run.pid} already runs as agent here" in second
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=20)
    assert run.returncode == 0
    assert "Traceback" not in err
    assert not (pi / "agent.sock").exists()
    assert splitedge("agent", "status", "--state", pi, "--json").json["agent"] is None


@pytest.mark.deadline
def test_running_agent_trains_when_it_is_invited(
    server: tuple[str, Path], pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    http, state = server
    own, training = tmp_path / "own.npz", state / "training" / "first"
    labels = np.arange(60) % 10
    x = np.repeat(SAMPLES, 12, axis=0)
    np.savez(own, x_train=x, y_train=labels, x_test=x[:10], y_test=labels[:10])
    recipe = read_recipe(
        {
            "method": "multi-exit",
            "data": {"name": own.name, "folder": tmp_path, "clients": 1},
            "train": {"backbone": "tiny", "rounds": 2, "batch": 20, "learning_rate": 0.01}
            | {"depth": 2},
        }
    )
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "run", "--state", str(pi)]
    log = tmp_path / "agent.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, "--train", str(own)], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as run,
        ExitStack() as stack,
    ):
        stack.callback(lambda: print(log.read_text()))
        stack.callback(run.kill)  # or leaving would wait for it, and hide what failed
        assert run.stdout is not None
        assert "pi-1 runs bench-tiny/1/d2" in run.stdout.readline()
        refusal = splitedge("agent", "train", "--data", own, "--state", pi).refusal
        assert "splitedge agent run --train" in refusal
        # training runs at low priority: slow on a busy machine
        settings = TrainerSettings(state, "first", Address("127.0.0.1", 0), join_s=200, server=http)
        report = train(recipe, settings, say=print, on_round=print)
        assert [row["participants"] for row in report["rounds"]] == [["pi-1"]] * 2, log.read_text()
        assert "pi-1 trains first at" in run.stdout.readline()
        assert "training is over: 2 rounds here" in run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=20) == 0
    # its personal weights fit only the bundle that is exported from that run
    words = ("--backbone", "tiny", "--data", "digits", "--int8", "never", "--out", tmp_path)
    weights = training / "weights.safetensors"
    splitedge("export", *words, "--weights", weights, "--name", "first")
    manifest = BundleManifest.load(tmp_path / "first" / "1" / "bundles" / "d2")
    assert manifest.run == (training / "run.id").read_text().strip()
    kept = PersonalWeights.load(pi, "first")
    found = kept.overrides(manifest)
    assert found.keys() == {"exit"}
    assert found["exit"].keys() == set(manifest.graphs["exit"].overridable)
    with pytest.raises(ConfigurationError, match="bench-tiny/1/d2: does not name the training run"):
        kept.overrides(BundleStore(pi).active().manifest)


def test_running_agent_takes_invitations_of_its_server_only(
    pi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BackgroundTraining(pi, "digits") as trainee:
        trainee.command({"op": "train", "url": "http://192.0.2.1:8100"})
        trainee.command({"op": "update"})
        assert trainee._process is None
    monkeypatch.setattr("edge_sdk.training.device.background.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="torch"):
        BackgroundTraining(pi, "digits")


def test_run_refuses_samples_that_it_cannot_train_on_at_the_start(
    pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    refusal = splitedge("agent", "run", "--state", pi, "--train", tmp_path / "none.npz").refusal
    assert "none.npz: expected a file there; put it in" in refusal
    np.savez(tmp_path / "bare.npz", x_train=np.zeros((9, 1, 8, 8), np.float32))
    refusal = splitedge("agent", "run", "--state", pi, "--train", tmp_path / "bare.npz").refusal
    assert "bare.npz: expected labels to train with, there are none" in refusal


def test_samples_are_read_in_a_process_of_their_own() -> None:
    assert check_data("digits").endswith("1,294 train, 144 held-out, 359 test")


def test_samples_that_cannot_be_read_are_told_in_plain_words_under_a_json_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITEDGE_LOG", "json")
    missing = str(tmp_path / "none.npz")
    with pytest.raises(ConfigurationError, match="expected a file there") as raised:
        check_data(missing)
    assert "{" not in str(raised.value)


@pytest.mark.deadline
@pytest.mark.parametrize("place", [0, 4])
def test_debug_shows_the_traceback_wherever_it_is_put(
    place: int, tmp_path: Path, splitedge: Splitedge
) -> None:
    words: list[object] = ["agent", "status", "--state", tmp_path]
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", *map(str, words)]
    command.insert(4 + place, "--debug")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "EnrolmentError" in done.stderr
    assert "Traceback" not in splitedge(*words).refusal


@pytest.mark.parametrize(
    "words",
    [
        ("agent", "predict"),
        ("agent", "enroll", "--server", "http://127.0.0.1:1"),
        ("agent", "predict", "x.npy", "--threshold", "low"),
        ("agent", "run", "--update-minutes", "0"),
        ("agent", "dance"),
        ("dance",),
    ],
)
def test_wrong_use_exits_with_2(words: tuple[str, ...], splitedge: Splitedge) -> None:
    called = splitedge(*words)
    assert (called.status, called.out) == (2, "")
    assert "--help" in called.err


def test_profile_of_a_catalogue_device_is_json(splitedge: Splitedge) -> None:
    profile = splitedge("agent", "profile", "--reference", "raspberry-pi-5", "--json").json
    assert profile["name"] == "raspberry-pi-5"
    refusal = splitedge("agent", "profile", "--reference", "toaster").refusal
    assert "raspberry-pi-5" in refusal  # one of the catalogue


def test_profile_of_the_bundle_is_a_table_of_its_graphs(pi: Path, splitedge: Splitedge) -> None:
    called = splitedge("agent", "profile", "--bundle", "--state", pi)
    assert (called.status, called.err) == (0, "")
    rows = [line.split("│") for line in called.out.splitlines() if "exit" in line]
    (cells,) = [[cell.strip() for cell in row] for row in rows]
    assert cells[1:3] == ["bench-tiny/1/d2 (active)", "exit"]
    assert float(cells[3]) > 0
    assert float(cells[4]) > 0
    taken = splitedge("agent", "profile", "--bundle", "--state", pi, "--json").json
    assert taken["active"]["bundle"] == "bench-tiny/1/d2"
    assert taken["active"]["graphs"]["exit"]["runs"] >= 5
    assert taken["others"] == []


def test_profile_of_the_bundle_needs_one(tmp_path: Path, splitedge: Splitedge) -> None:
    refusal = splitedge("agent", "profile", "--bundle", "--state", tmp_path).refusal
    assert "splitedge agent update" in refusal
    both = ("--bundle", "--reference", "raspberry-pi-5")
    assert "without --reference" in splitedge("agent", "profile", *both).refusal


@pytest.mark.parametrize("words", [("list",), ("lift", "3fa9c1")])
def test_quarantine_of_a_folder_without_a_device_is_refused(
    words: tuple[str, ...], tmp_path: Path, splitedge: Splitedge
) -> None:
    called = splitedge("agent", "quarantine", *words, "--state", tmp_path / "nodev")
    assert "splitedge agent enroll" in called.refusal
