"""Fixtures of the bundle tests: exports, a depot that serves them, and devices with a bundle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_sdk.bundles.update import update
from tests.edge.bundles.depot import Depot, Export


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """A place for exports."""
    return Export(tmp_path / "exports")


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[Depot]:
    """A server without bundles."""
    depot = Depot(tmp_path / "server")
    yield depot
    depot.close()


@pytest.fixture(scope="session")
def _furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: a device that runs tiny/1/d2, a server that has tiny/2/d2 as well."""
    folder = tmp_path_factory.mktemp("furnished")
    export = Export(folder / "exports")
    depot = Depot(folder / "server")
    depot.enrol(folder / "device")
    depot.repository.publish_bundles(export.write(1))
    assert update(folder / "device", "tiny/1/d2").status == "installed"
    depot.repository.publish_bundles(export.write(2))
    depot.close()
    return folder


@pytest.fixture
def installed(_furnished: Path, depot: Depot, tmp_path: Path) -> Path:
    """The state folder of a device that runs tiny/1/d2, while `depot` has tiny/2/d2 too."""
    for folder in (tmp_path / "server" / "keys", tmp_path / "server" / "tuf"):
        shutil.rmtree(folder)
        shutil.copytree(_furnished / "server" / folder.name, folder)
    shutil.copytree(_furnished / "device", tmp_path / "device", symlinks=True)
    depot.enrol(tmp_path / "device")
    return tmp_path / "device"


@pytest.fixture
def state(tmp_path: Path, depot: Depot) -> Path:
    """The state folder of a device enrolled at `depot`."""
    folder = tmp_path / "device"
    depot.enrol(folder)
    return folder
