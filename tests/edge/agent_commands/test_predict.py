"""`splitedge agent predict` against a real server, with the files that people have."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from edge_sdk.errors import InputError
from edge_sdk.nets import build
from edge_sdk.pipeline.samples import read_samples
from edge_sdk.session import Array
from tests.commands import Splitedge
from tests.edge.agent_commands.samples import NEVER, SAMPLES, SPEC


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], list[int]]:
    """Labels of SAMPLES by torch: the exit head's and the whole network's."""
    net = build("tiny", input_shape=SPEC.shape, classes=10, seed=0).eval()
    with torch.inference_mode():
        exits, final = net.forward_exits(torch.from_numpy(SAMPLES))
    return exits[2].argmax(1).tolist(), final.argmax(1).tolist()


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
