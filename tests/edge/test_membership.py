"""A device's own commands and orders about its identity and its switch, without a server."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from edge_sdk.identity import Identity
from edge_sdk.membership.orders import Membership
from edge_sdk.offload.switch import OffloadSwitch
from edge_sdk.state import StateLock
from tests.commands import Splitedge
from tests.edge.full_disk import full_disk

PI = Identity("http://127.0.0.1:8000", "pi", "lab", "0" * 64)


def test_only_another_credential_is_logged_as_a_new_credential(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    told: list[Identity] = []
    PI.save(tmp_path)
    membership = Membership(tmp_path, PI, changed=told.append, lift=lambda _: None)
    allowed = replace(PI, insecure=True)
    allowed.save(tmp_path)
    membership.look()
    assert "new credential" not in caplog.text
    rotated = replace(allowed, credential="1" * 64)
    rotated.save(tmp_path)
    membership.look()
    membership.look()
    assert caplog.text.count("device=pi has a new credential") == 1
    assert told == [allowed, rotated]


def test_a_switch_that_a_full_disk_does_not_keep_was_not_turned(
    tmp_path: Path, splitedge: Splitedge
) -> None:
    PI.save(tmp_path)
    command = ("agent", "offloading", "off", "--state", tmp_path)
    with full_disk(0):
        refusal = splitedge(*command).refusal
    assert "offloading was not turned off: " in refusal
    assert "until the agent ends" not in refusal
    assert OffloadSwitch(tmp_path).on
    assert "offloading is off" in splitedge(*command).out


def test_permission_is_not_written_over_a_new_credential(
    tmp_path: Path, splitedge: Splitedge
) -> None:
    PI.save(tmp_path)
    command = ("agent", "insecure", "allow", "--state", tmp_path)
    with StateLock(tmp_path, "rotation"):
        for refused in (command, ("agent", "rotate", "--state", tmp_path)):
            refusal = splitedge(*refused).refusal
            assert "is being replaced at this moment; run it again in some seconds" in refusal
    assert not Identity.load(tmp_path).insecure
    assert splitedge(*command).status == 0
    assert Identity.load(tmp_path).insecure


@pytest.mark.parametrize("server", ["http://[::1:8000", "hub:8000"])
def test_a_mistyped_server_is_refused_before_the_token_is_read(
    server: str, tmp_path: Path, splitedge: Splitedge
) -> None:
    words = ("--server", server, "--token-file", tmp_path / "none", "--state", tmp_path / "pi")
    refusal = splitedge("agent", "enroll", *words).refusal
    assert f"--server: expected http(s)://HOST[:PORT], got '{server}'" in refusal
