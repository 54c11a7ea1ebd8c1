"""What docs/api.md says to type, typed: only ports are put in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.reader import WRITTEN_HTTP, Document, Reader, environment, started_server

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

PAGE = Document("docs/api.md")
TOKEN = "\nsplitedge server token create --state server"


@pytest.fixture
def reader(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """The page's server with the model digits/1."""
    folder = tmp_path_factory.mktemp("api-page")
    exported.install(folder / "server" / "models")
    with started_server(folder, PAGE.snippet("server") + TOKEN) as reader:
        yield reader


def test_the_page_in_the_order_of_a_reader(reader: Reader) -> None:
    reader.shell(PAGE.snippet("create"))
    address = reader.http.removeprefix("http://")
    program = PAGE.snippet("client").replace(WRITTEN_HTTP.removeprefix("http://"), address)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-c", program],
            cwd=reader.folder,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    asked = run()
    assert asked.stdout.strip() in {f"[{digit}]" for digit in range(10)}, asked.stderr
    assert "shop-app" in reader.shell(PAGE.snippet("manage"))
    events = reader.shell("splitedge server audit --what key. --state server")
    assert "key.create" in events
    assert "key.revoke" in events
