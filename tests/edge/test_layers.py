"""Importing a device package loads no library that only a server, a trainer or an update needs.

Which module may import which is checked by `make lint` ([tool.importlinter] in pyproject.toml).
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "fastapi", "sqlalchemy", "tuf", "typer", "onnx", "uvicorn")


@pytest.mark.parametrize("package", ["profiles", "edge_sdk", "edge_sdk.agent"])
def test_a_device_package_loads_nothing_of_the_server(package: str) -> None:
    code = f"import sys, {package}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
