"""A user's own `profiles.py`, `server.py` or `exporters.py` next to a script breaks nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from server.tokens import create_token

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

ROOT = Path(__file__).parents[2]
FOREIGN = ("profiles", "server", "exporters")

PREDICT = """
import sys
import numpy as np
from edge_sdk import AgentSettings, EdgeAgent

settings = AgentSettings(threshold=-1.0, deadline_s=5.0)  # offloads every input
with EdgeAgent.open(sys.argv[1], settings) as agent:
    print(*[agent.predict(x).source for x in np.load(sys.argv[2])])
"""
IMPORT = "import {0}; assert {0}.OWNER == 'user'\n"

ENROLL = """
import sys
import profiles
from edge_sdk import enroll
import profiles as again

print(enroll(sys.argv[1], sys.argv[2], sys.argv[3], name="foreign").device)
assert profiles is again and profiles.OWNER == "user"
"""


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder with files of the names of our packages."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in FOREIGN:
        (folder / f"{name}.py").write_text("OWNER = 'user'\n")
    return folder


def run(folder: Path, *command: object, path: object = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command in the user's folder, as from a shell."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("order", ["ours first", "the user's first"])
def test_an_agent_and_the_users_modules_share_a_script(
    fleet: Fleet, digits: Digits, user_folder: Path, tmp_path: Path, order: str
) -> None:
    np.save(tmp_path / "x.npy", digits.x[:3])
    # a message limit below every query: the HTTP path is loaded too
    state = fleet.device(f"foreign-{len(order)}", max_packet_bytes=200)
    imports = "".join(IMPORT.format(name) for name in FOREIGN)
    parts = (PREDICT, imports) if order == "ours first" else (imports, PREDICT)
    (user_folder / "app.py").write_text("".join(parts))
    done = run(user_folder, sys.executable, "app.py", state, tmp_path / "x.npy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["server"] * 3


def test_a_script_with_the_name_of_our_package_runs_an_agent(
    digits: Digits, user_folder: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", digits.x[0])
    (user_folder / "server.py").write_text(
        "import sys\nimport numpy as np\nfrom edge_sdk import EdgeAgent\n"
        "with EdgeAgent.from_bundle(sys.argv[1]) as agent:\n"
        "    print(agent.predict(np.load(sys.argv[2])).source)\n"
    )
    bundle = digits.models / "digits" / "1" / "bundles" / "d2"
    done = run(user_folder, sys.executable, "server.py", bundle, tmp_path / "x.npy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["device"]


def test_a_script_next_to_a_users_profiles_enrols_a_device(fleet: Fleet, user_folder: Path) -> None:
    (user_folder / "app.py").write_text(ENROLL)
    token = create_token(fleet.state)
    done = run(user_folder, sys.executable, "app.py", fleet.http, token, user_folder / "pi")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["foreign"]


def test_every_module_of_ours_loads_next_to_a_users_profiles(user_folder: Path) -> None:
    code = """
import profiles
import edge_sdk.training.client, exporters.model
from profiles.reference import load_reference
assert profiles.OWNER == "user"
assert load_reference("raspberry-pi-4").name == "raspberry-pi-4"
"""
    (user_folder / "exporters.py").unlink()  # the script wants ours
    (user_folder / "app.py").write_text(code)
    done = run(user_folder, sys.executable, "app.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("module", "clashes"), [("models", False), ("device", True)])
def test_a_users_package_may_not_have_a_module_of_ours(
    user_folder: Path, module: str, clashes: bool
) -> None:
    (user_folder / "profiles.py").unlink()
    package = user_folder / "profiles"
    package.mkdir()
    (package / "__init__.py").write_text("OWNER = 'user'\n")
    (package / f"{module}.py").write_text("OWNER = 'user'\n")
    (user_folder / "app.py").write_text(
        f"from edge_sdk import AgentSettings\nimport profiles.{module}\n"
        f"AgentSettings()\nassert profiles.{module}.OWNER == 'user'\n"
    )
    done = run(user_folder, sys.executable, "app.py")
    if not clashes:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "edge_sdk.errors.HiddenPackageError:"
        f" {package / 'device.py'} hides profiles.device of splitedge; rename that file"
    )


def test_the_products_code_names_modules_of_profiles_in_full() -> None:
    """`from profiles import probe` would find a user's file, `from profiles.device` finds ours."""
    bare = [
        str(path.relative_to(ROOT))
        for folder in ("edge_sdk", "exporters", "server")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(
            r"^\s*(from profiles import|import profiles\b)", path.read_text(), re.MULTILINE
        )
    ]
    assert not bare


def test_the_command_works_in_such_a_folder(user_folder: Path) -> None:
    command = shutil.which("splitedge", path=Path(sys.executable).parent)
    words = [sys.executable, "-P", "-m", "edge_sdk.cli"] if command is None else [command]
    done = run(user_folder, *words, "agent", "profile", "--reference", "raspberry-pi-4", "--json")
    assert done.returncode == 0, done.stderr
    assert '"raspberry-pi-4"' in done.stdout
    done = run(user_folder, *words, "--help")
    assert done.returncode == 0, done.stderr
    assert "export" in done.stdout


def test_the_command_works_with_a_users_profiles_on_the_path(user_folder: Path) -> None:
    for name in ("server", "exporters"):
        (user_folder / f"{name}.py").unlink()
    path = os.pathsep.join((str(user_folder), str(ROOT)))
    words = ["agent", "profile", "--reference", "raspberry-pi-4"]
    done = run(user_folder, sys.executable, "-P", "-m", "edge_sdk.cli", *words, path=path)
    assert done.returncode == 0, done.stderr


def test_the_command_names_a_file_that_hides_a_package(user_folder: Path) -> None:
    path = os.pathsep.join((str(user_folder), str(ROOT)))
    words = ["server", "--help"]
    done = run(user_folder, sys.executable, "-P", "-m", "edge_sdk.cli", *words, path=path)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {user_folder / 'server.py'} hides server of splitedge; rename that file\n"
    )
