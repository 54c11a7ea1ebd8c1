"""The operator's key file: made once, whole, for its owner only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_sdk.errors import ConfigurationError
from server.registry.operator import load_operator_secret, load_or_create_operator_secret


def test_the_secret_is_made_once_and_found_again(tmp_path: Path) -> None:
    secret = load_or_create_operator_secret(tmp_path)
    assert len(secret) == 43  # 256 bits in base64, 6 a character
    assert load_or_create_operator_secret(tmp_path) == load_operator_secret(tmp_path) == secret
    assert [file.name for file in (tmp_path / "keys").iterdir()] == ["operator.key"]
    assert (tmp_path / "keys" / "operator.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700


def test_eight_that_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def make(_: int) -> str:
        together.wait()
        return load_or_create_operator_secret(tmp_path)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(8)))) == 1


def test_a_server_that_never_ran_has_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="start the server once"):
        load_operator_secret(tmp_path)


def test_a_secret_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    secret = load_or_create_operator_secret(tmp_path)
    (tmp_path / "keys" / "operator.key").chmod(0o640)
    with pytest.raises(ConfigurationError, match="mode 640") as caught:
        load_or_create_operator_secret(tmp_path)
    assert secret not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 43])
def test_a_damaged_secret_is_not_used(tmp_path: Path, content: bytes) -> None:
    load_or_create_operator_secret(tmp_path)
    (tmp_path / "keys" / "operator.key").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"operator\.key"):
        load_operator_secret(tmp_path)
