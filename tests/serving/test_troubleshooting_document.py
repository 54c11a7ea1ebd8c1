"""What docs/troubleshooting.md says to type, typed; and the product says what the page quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from server.bench.models import export_random
from tests.reader import ROOT, WRITTEN_HTTP, Document, Reader, started_server

pytestmark = pytest.mark.broker

PAGE = Document("docs/troubleshooting.md")
SERVER = "splitedge server run --state server &\nsplitedge server token create --state server"
ENROLL = f"splitedge agent enroll --server {WRITTEN_HTTP} --token TOKEN --state device"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A server with a model, and a device that is enrolled there."""
    folder = tmp_path_factory.mktemp("troubleshooting-page")
    export_random("tiny", (1, 8, 8), (1,), folder / "server" / "models")
    with started_server(folder, SERVER) as reader:
        reader.shell(ENROLL)
        yield reader


def test_status_of_a_device_has_the_lines_of_the_page(reader: Reader) -> None:
    printed = reader.shell(PAGE.snippet("device"))
    lines = dict(re.findall(r"^[│| ]*(\w[\w ]*?) *[│|] *(.*?) *[│|]?$", printed, re.MULTILINE))
    assert lines["bundle"].startswith("bench-tiny/1/")
    assert (lines["server answers"], lines["broker answers"]) == ("yes", "yes")
    assert lines["agent"] == "does not run"
    first_table = PAGE.text.partition("The log says")[0]
    named = re.findall(r"^\| `([a-z ]+)` \|", first_table, re.MULTILINE)
    assert set(named) - lines.keys() == {"clock"}  # which is right here


def test_the_server_is_examined(reader: Reader) -> None:
    printed = reader.shell(PAGE.snippet("server"))
    assert "registry" in printed
    assert "certificate" in printed or "TLS" in printed


def test_what_the_page_quotes_is_what_the_product_says() -> None:
    table = PAGE.text.partition("| you see | look at |")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    sources = "".join(
        path.read_text()
        for folder in ("edge_sdk", "server")
        for path in (ROOT / folder).rglob("*.py")
    )
    assert len(quoted) >= 5
    assert not [text for text in quoted if text not in sources]
