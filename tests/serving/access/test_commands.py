"""`splitedge server keys` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from server.registry.database import open_registry
from server.registry.location import RegistryLocation, settle

if TYPE_CHECKING:
    from tests.commands import Splitedge

DAY_S = 86_400


@pytest.fixture
def state(tmp_path: Path) -> str:
    """The state folder of a server that has run."""
    folder = tmp_path / "state"
    folder.mkdir()
    location: RegistryLocation = settle(folder, None)
    location.save(folder)
    open_registry(folder, location).close()
    return str(folder)


def test_key_is_made_listed_and_revoked(splitedge: Splitedge, state: str) -> None:
    made = splitedge(
        *("server", "keys", "create", "--scope", "infer", "--model", "digits"),
        *("--name", "app", "--expires", "90d", "--limit-requests", "5", "--state", state),
    )
    key = made.out.strip()
    assert key.startswith("sek_")
    assert "digits is published yet" in made.err
    (listed,) = splitedge("server", "keys", "list", "--json", "--state", state).json
    assert (listed["name"], listed["scopes"], listed["models"]) == ("app", ["infer"], ["digits"])
    assert listed["expires_at"] - listed["created_at"] == 90 * DAY_S
    assert listed["requests"] == 5
    assert "key_sha256" not in listed
    shown = splitedge("server", "keys", "list", "--state", state).out
    assert "app" in shown
    assert "never" in shown
    assert key not in shown
    splitedge("server", "keys", "revoke", "app", "--state", state)
    assert "revoked" in splitedge("server", "keys", "list", "--state", state).out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--scope", "root"], "infer, operate, train"),
        (["--scope", "operate", "--model", "digits"], "infer"),
        (["--scope", "infer", "--expires", "soon"], "90s"),
    ],
)
def test_key_that_makes_no_sense_is_refused(
    splitedge: Splitedge, state: str, options: list[str], said: str
) -> None:
    refused = splitedge("server", "keys", "create", *options, "--state", state)
    assert refused.status != 0
    assert said in refused.err
    assert "no keys yet" in splitedge("server", "keys", "list", "--state", state).out
