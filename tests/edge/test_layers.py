"""Imports point down: profiles <- edge_sdk <- exporters <- server <- benchmarks; and one outside
library has one importer.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("profiles", "edge_sdk", "exporters", "server", "benchmarks")
HEAVY = ("torch", "fastapi", "sqlalchemy", "tuf", "typer", "onnx", "amqtt", "uvicorn")

# on the device; the server has its own ends of MQTT brokers, TUF and onnxruntime's quantiser
SOLE_IMPORTERS = {
    "onnxruntime": "edge_sdk/session.py",
    "paho": "edge_sdk/mqtt.py",
    "tuf": "edge_sdk/bundles/repository.py",
}
SOLE_IMPORTERS_EVERYWHERE = {
    "psutil": "profiles/device.py",
    "urllib3": "edge_sdk/http.py",
}


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("floor", FLOORS)
def test_a_package_imports_only_itself_and_what_lies_below(floor: str) -> None:
    above = set(FLOORS[FLOORS.index(floor) + 1 :])
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files(floor)
        for module in imports(path)
        if module.partition(".")[0] in above
    ]
    assert not wrong


@pytest.mark.parametrize(("library", "importer"), SOLE_IMPORTERS.items())
def test_an_outside_library_has_one_importer_on_the_device(library: str, importer: str) -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in files("profiles", "edge_sdk")
        for module in imports(path)
        if module.partition(".")[0] == library
    }
    assert found == {importer}


@pytest.mark.parametrize(("library", "importer"), SOLE_IMPORTERS_EVERYWHERE.items())
def test_an_outside_library_has_one_importer_in_the_product(library: str, importer: str) -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in files("profiles", "edge_sdk", "exporters", "server")
        if any(module.partition(".")[0] == library for module in imports(path))
    }
    assert found == {importer}


def test_torch_stays_in_nets_and_training() -> None:
    found = {
        str(path.relative_to(ROOT).parent)
        for path in files("profiles", "edge_sdk")
        if any(module.partition(".")[0] == "torch" for module in imports(path))
    }
    training = {
        f"edge_sdk/training/{room}" for room in ("client", "data", "device", "formulas", "protocol")
    }
    assert found <= {"edge_sdk/nets", *training}


@pytest.mark.parametrize("package", ["profiles", "edge_sdk", "edge_sdk.agent"])
def test_a_device_package_loads_nothing_of_the_server(package: str) -> None:
    code = f"import sys, {package}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
