from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from edge_sdk.errors import ConfigurationError
from server.backend.models import ModelStore
from server.backend.provider import provider_of
from server.cli import app

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


@pytest.mark.parametrize(
    ("wanted", "there", "taken"),
    [
        ("auto", ("cpu",), "cpu"),
        ("auto", ("cpu", "openvino", "xnnpack"), "cpu"),
        ("auto", ("cpu", "cuda", "tensorrt"), "cuda"),
        ("cpu", ("cpu", "cuda"), "cpu"),
        ("openvino", ("cpu", "openvino"), "openvino"),
    ],
)
def test_a_gpu_is_taken_where_there_is_one(wanted: str, there: tuple[str, ...], taken: str) -> None:
    assert provider_of(wanted, there) == taken


def test_a_provider_that_is_not_there_is_refused_with_what_to_install() -> None:
    with pytest.raises(ConfigurationError, match=r"built for cpu; .* onnxruntime-gpu"):
        provider_of("cuda", ("cpu",))


def test_a_gpu_that_does_not_start_leaves_the_models_to_the_cpu(
    exported: Exported, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The onnxruntime of the tests has no CUDA, so that it starts as little as without a driver."""
    exported.install(tmp_path / "models")
    store = ModelStore(tmp_path / "models", provider="cuda", or_cpu=True)
    with caplog.at_level(logging.INFO, "server"):
        store.load()
    assert store.ready
    assert "cuda is not used, the CPU is" in caplog.text
    assert "loaded, by cpu" in caplog.text


def test_a_gpu_that_is_asked_for_and_does_not_start_is_an_error(
    exported: Exported, tmp_path: Path
) -> None:
    exported.install(tmp_path / "models")
    store = ModelStore(tmp_path / "models", provider="cuda")
    store.load()
    assert not store.ready
    assert "provider cuda does not start here" in store.broken()["digits", "1"]


def test_an_unknown_provider_is_refused_by_its_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "--state", str(tmp_path), "--provider", "gpu"])
    assert "provider" in str(result.exception)
    assert "cuda" in str(result.exception)


def test_a_provider_that_is_not_there_leaves_no_state_behind(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = [
        "run",
        "--state",
        str(state),
        "--http",
        "127.0.0.1:0",
        "--mqtt",
        "embedded:127.0.0.1:0",
    ]
    result = CliRunner().invoke(app, [*words, "--provider", "cuda"])
    assert "onnxruntime-gpu" in str(result.exception)
    assert not state.exists()
