"""Every configuration of a server that might listen in the clear: FAULTS row 13.

All combinations are judged by the settings, and each option once by the command line. There, a
lock on the state folder ends each run that is accepted, before it listens anywhere: what is
refused for its addresses is refused before that, and says so.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from benchmarks.mqtt.certificates import self_signed
from edge_sdk.errors import ConfigurationError
from edge_sdk.state import StateLock
from edge_sdk.wire.address import Address
from server.run import choose_broker
from server.settings import ServerSettings
from tests.commands import Splitedge


class Choice(NamedTuple):
    """A way to give one option, and what it means by hand.

    Attributes:
        clear: others reach it, or are sent there, without encryption if the server has no TLS
            ("without TLS"), in any case ("always"), or never.
    """

    words: tuple[str, ...]
    clear: str


HTTP: Final = (
    Choice(("--http", "127.0.0.1:0"), "never"),
    Choice(("--http", "localhost:0"), "never"),
    Choice(("--http", "[::1]:0"), "never"),
    Choice(("--http", "0.0.0.0:0"), "without TLS"),
    Choice(("--http", "[::]:0"), "without TLS"),
    Choice(("--http", "192.0.2.7:0"), "without TLS"),
    Choice(("--http", "edge.example:0"), "without TLS"),
)
# a login in the URL is worth no more than its encryption
MQTT: Final = (
    Choice((), "never"),
    Choice(("--mqtt", "embedded:127.0.0.1:0"), "never"),
    Choice(("--mqtt", "embedded:0.0.0.0:0"), "without TLS"),
    Choice(("--mqtt", "mosquitto:[::1]:0"), "never"),
    Choice(("--mqtt", "mosquitto:192.0.2.7:0"), "without TLS"),
    Choice(("--mqtt", "auto:127.0.0.2:0"), "never"),
    Choice(("--mqtt", "auto:0.0.0.0:0"), "without TLS"),
    Choice(("--mqtt", "mqtt://127.0.0.1:1883"), "never"),
    Choice(("--mqtt", "mqtt://backend:secret@localhost:1883"), "never"),
    # the server's certificate is its own listeners', so it encrypts nothing here
    Choice(("--mqtt", "mqtt://hub.example:1883"), "always"),
    Choice(("--mqtt", "mqtt://backend:secret@hub.example:1883"), "always"),
    Choice(("--mqtt", "mqtts://hub.example:8883"), "never"),
    Choice(("--mqtt", "mqtts://backend:secret@hub.example:8883"), "never"),
)
# without TLS of its own, a server on loopback tells what the operator's tunnel or proxy speaks;
# a device refuses to send its login there (tests/edge/test_clear_text.py)
PUBLIC: Final = (
    Choice((), "never"),
    Choice(("--mqtt-public", "mqtts://hub.example:8883"), "never"),
    Choice(("--mqtt-public", "mqtt://127.0.0.1:1884"), "never"),
    Choice(("--mqtt-public", "mqtt://hub.example:1884"), "with TLS"),
)


def clear(choice: Choice, *, tls: bool) -> bool:
    """Whether the choice lets secrets travel in the clear."""
    return choice.clear in ("always", "with TLS" if tls else "without TLS")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_whatever_the_options_are_a_server_in_the_clear_is_refused_unless_told_insecure(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """FAULTS row 13: host, TLS, the broker and its login, its public address, `--insecure`."""
    judged = 0
    for http, mqtt, public, tls, insecure in itertools.product(
        HTTP, MQTT, PUBLIC, (False, True), (False, True)
    ):
        choices = (http, mqtt, public)
        forbidden = [choice for choice in choices if clear(choice, tls=tls)]
        why = refusal_of_settings(tmp_path, choices, pair if tls else None, insecure=insecure)
        if forbidden and not insecure:
            assert "or --insecure to allow it" in why, (choices, tls)
            assert any(choice.words[0] in why for choice in forbidden), (choices, tls)
        else:
            assert not why, (choices, tls, insecure)
        judged += 1
    assert judged == 7 * 13 * 4 * 2 * 2


def refusal_of_settings(
    state: Path, choices: tuple[Choice, ...], pair: tuple[Path, Path] | None, *, insecure: bool
) -> str:
    """Why the settings of `server run` refuse these choices; empty if they do not."""
    given = {choice.words[0]: choice.words[1] for choice in choices if choice.words}
    # a port of its own for "auto" would be looked for, which takes longer than all the rest
    program, broker = choose_broker(given.get("--mqtt", "auto:127.0.0.1:1883"), None)
    certificate, key = pair or (None, None)
    try:
        ServerSettings(
            state=state,
            http=Address.parse(given["--http"], "--http"),
            broker=broker,
            broker_program=program,
            mqtt_public=given.get("--mqtt-public"),
            tls_cert=certificate,
            tls_key=key,
            insecure=insecure,
        )
    except ConfigurationError as err:
        return str(err)
    return ""


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_command_line_refuses_each_option_that_would_be_in_the_clear(
    tls: bool, pair: tuple[Path, Path], splitedge: Splitedge, tmp_path: Path
) -> None:
    """FAULTS row 13: each option by itself, as it is typed."""
    state = tmp_path / "server"
    command: tuple[object, ...] = ("server", "run", "--state", state, "--http", "127.0.0.1:0")
    if tls:
        command += ("--tls-cert", pair[0], "--tls-key", pair[1])
    with StateLock(state, "server"):
        for choice in (*HTTP, *MQTT, *PUBLIC):
            if not clear(choice, tls=tls):
                continue
            refusal = splitedge(*command, *choice.words).refusal
            assert choice.words[0] in refusal
            assert "or --insecure to allow it" in refusal
            allowed = splitedge(*command, *choice.words, "--insecure").refusal
            assert "already runs as server here" in allowed, choice
        assert "already runs as server here" in splitedge(*command).refusal
