"""The ground floor stays light: modules that `profiles` loads in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "onnxruntime", "edge_sdk", "exporters", "server", "paho", "fastapi")


def test_profiles_pulls_in_neither_torch_nor_onnxruntime() -> None:
    names = "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    code = f"import sys; from profiles import *; {names}"
    child = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = child.stdout.split()
    assert "psutil" in loaded
    assert not set(HEAVY) & set(loaded)
