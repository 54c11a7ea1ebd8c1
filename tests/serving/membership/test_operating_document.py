"""What docs/operating.md says to type, typed: only ports and the token are put in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from edge_sdk import api
from edge_sdk.errors import EnrolmentError
from edge_sdk.identity import Identity
from tests.reader import Document, Reader, started_server
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

PAGE = Document("docs/operating.md")


@pytest.fixture(scope="module")
def reader(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """The page's server, with a model."""
    folder = tmp_path_factory.mktemp("operating")
    (folder / "server").mkdir()
    (folder / "server" / "models").symlink_to(models)
    with started_server(folder, PAGE.snippet("server") + PAGE.snippet("token")) as reader:
        yield reader


def test_the_page_in_the_order_of_a_reader(reader: Reader) -> None:
    """FAULTS row 25: the device waits for the operator."""
    folder = reader.folder
    enroll = PAGE.snippet("enroll").rstrip().removesuffix("&")
    reader.shell(f"{enroll} > said 2>&1 &")
    wait_until(lambda: "devices approve pi-4" in (folder / "said").read_text(), "no word", 60)
    listed, approved = reader.shell(PAGE.snippet("approve")).rstrip().rsplit("\n", 1)
    assert "pi-4" in listed
    assert approved == "pi-4 is approved"
    wait_until(
        lambda: "enrolled as pi-4" in (folder / "said").read_text(),
        (folder / "said").read_text,
        60,
    )
    before = Identity.load(folder / "pi")
    asked, done = reader.shell(PAGE.snippet("rotate")).splitlines()
    assert asked == "pi-4 is asked to replace its credential"
    assert done == "pi-4 has a new credential"
    assert Identity.load(folder / "pi") != before
    nothing = reader.shell(PAGE.snippet("quarantine")).splitlines()
    assert nothing == ["no device has refused a bundle", "no bundle is quarantined"]
    assert reader.shell(PAGE.snippet("revoke")) == "pi-4 is revoked\n"
    with pytest.raises(EnrolmentError, match="revoked"):
        api.is_approved(Identity.load(folder / "pi"))
    by_time, by_device, refused = PAGE.snippet("audit").splitlines()
    (entry, *_) = wait_until(lambda: orjson.loads(reader.shell(refused)), "no refusal", 20)
    assert (entry["who"], entry["outcome"]) == ("pi-4", "refused")
    shown = reader.shell(f"{by_time}\n{by_device}")
    for what in ("token.create", "device.enrol", "device.approve", "credential.confirm"):
        assert what in shown
    for what in ("device.revoke", "waits for approval"):  # done to it, and by it
        assert what in shown
