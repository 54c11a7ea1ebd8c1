"""Announcements as they are written and read, and the server that is chosen of those found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_sdk.discovery.record import HOSTS_BYTES, HOSTS_TRIED, ServerRecord, chosen_server
from edge_sdk.errors import ConfigurationError

HUB = ServerRecord("hub", ("hub.local", "192.168.1.10"), 8443, tls=True, certificate="ab" * 32)


def texts(record: ServerRecord, **other: str) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in (record.texts() | other).items()}


def test_what_is_written_is_read() -> None:
    for record in (HUB, replace(HUB, hosts=("fe80::1",), tls=False, certificate="")):
        assert ServerRecord.read("hub", 8443, texts(record)) == record
    assert replace(HUB, hosts=("fe80::1",)).url() == "https://[fe80::1]:8443"


def test_only_hosts_that_fit_are_announced() -> None:
    many = replace(HUB, hosts=tuple(f"host-{number:03}.example" for number in range(50)))
    read = ServerRecord.read("hub", 8443, texts(many))
    assert read is not None
    assert read.hosts == many.hosts[: len(read.hosts)]
    assert 0 < len(read.texts()["hosts"]) < HOSTS_BYTES


def test_a_host_that_is_too_long_keeps_out_no_other() -> None:
    long = replace(HUB, hosts=("x" * HOSTS_BYTES, *HUB.hosts))
    assert long.texts()["hosts"] == "hub.local,192.168.1.10"


@pytest.mark.parametrize(
    "wrong",
    [
        {"v": "2"},
        {"scheme": "ftp"},
        {"hosts": ""},
        {"hosts": "hub.local,"},
        {"hosts": "good.example@evil.example"},
        {"hosts": "evil.example/path?"},
        {"hosts": "hub\x1b[2J"},
        {"certificate": "ab"},
    ],
)
def test_another_form_is_not_read(wrong: dict[str, str]) -> None:
    assert ServerRecord.read("hub", 8443, texts(HUB, **wrong)) is None


def test_texts_of_any_bytes_are_not_read() -> None:
    assert ServerRecord.read("hub", 8443, {b"\xff": b"\xff", b"v": None}) is None
    assert ServerRecord.read("hub", 0, texts(HUB)) is None


def test_the_only_server_is_chosen_by_a_name_that_resolves() -> None:
    def choose(*hosts: str) -> str:
        return chosen_server(
            [HUB], has_authority=True, waited_s=10, reaches=lambda host: host in hosts
        )

    assert choose("hub.local", "192.168.1.10") == "https://hub.local:8443"
    assert choose("192.168.1.10") == "https://192.168.1.10:8443"
    assert choose() == "https://hub.local:8443"  # its own error says that it is not known


def test_hostile_announcements_are_not_looked_up_one_after_the_other() -> None:
    asked: list[str] = []

    def reaches(host: str) -> bool:
        asked.append(host)
        return False

    many = replace(HUB, hosts=tuple(f"h{n}" for n in range(60)))
    with pytest.raises(ConfigurationError, match="2 servers announced"):
        chosen_server(
            [many, replace(many, name="evil")], has_authority=True, waited_s=10, reaches=reaches
        )
    assert asked == []
    chosen_server([many], has_authority=True, waited_s=10, reaches=reaches)
    assert len(asked) == HOSTS_TRIED


@pytest.mark.parametrize(
    ("found", "has_authority", "said"),
    [
        ([], True, "no server announced itself on this network within 10 s; start the server with"),
        ([HUB], False, "give --ca FILE"),
        ([replace(HUB, tls=False)], True, "give --server http://hub.local:8443"),
        ([replace(HUB, tls=False, hosts=("127.0.0.1",))], True, "without encryption"),
        ([HUB, replace(HUB, name="evil")], True, "2 servers announced themselves: 'evil' at"),
        ([replace(HUB, name=f"h{n:03}") for n in range(30)], True, "and 22 more; give that of"),
    ],
)
def test_nothing_is_chosen_that_nobody_vouches_for(
    found: list[ServerRecord], has_authority: bool, said: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        chosen_server(found, has_authority=has_authority, waited_s=10)
    assert said in str(refused.value)
