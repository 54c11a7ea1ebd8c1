"""The ground floor stays light: what `import profiles` brings along in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "onnxruntime", "edge_sdk", "exporters", "server", "paho", "fastapi")


def test_profiles_pulls_in_neither_torch_nor_onnxruntime() -> None:
    code = "import sys, profiles; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    child = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = child.stdout.split()
    assert "psutil" in loaded
    assert not set(HEAVY) & set(loaded)
