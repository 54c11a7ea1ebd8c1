"""Kinds of sinks, as a user names them: `-`, `jsonl:FILE`, `mqtt://HOST/TOPIC`, ..."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import names_function, user_function
from edge_sdk.pipeline.sinks.function import FunctionWriter
from edge_sdk.pipeline.sinks.json_lines import SIZE_MAX_MB, FileWriter, StreamWriter
from edge_sdk.pipeline.sinks.sink import Sink, Writer
from edge_sdk.pipeline.words import Word, read_word, without_login

COMMON: Final = ("only", "queue")
QUEUE: Final = 1000
_BROKER: Final = re.compile(r"//(?P<login>[^/@]*@)?(?P<host>[^/]+)/(?P<topic>.+)")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of sink.

    Attributes:
        example: a word of this kind.
        about: its outputs, in a few words.
        keys: of its options, besides those of every sink.
    """

    example: str
    about: str
    keys: tuple[str, ...]
    open: Callable[[Word, Path], Writer]


def open_sink(text: str, base: Path) -> Sink:
    """The sink that a word names. It connects in the background.

    Args:
        base: relative paths start there, and modules of the user are searched there.
    Raises: ConfigurationError saying which part of the word is wrong.
    """
    head = text.partition("?")[0]
    kind = SINKS.get(head.partition(":")[0])
    known = ", ".join(each.example for each in SINKS.values())
    if kind is None and not names_function(head):
        shown = without_login(text)
        raise ConfigurationError(f"sink {shown}: expected one of {known}, or module:function")
    word = read_word(text, (*COMMON, *(kind.keys if kind is not None else ())))
    only = word.options.get("only", "all")
    if only not in ("all", "changes"):
        raise word.fault(f"only: expected all or changes, got {only}")
    queue = word.whole("queue", QUEUE)
    if kind is not None:
        writer = kind.open(word, base)
    else:
        try:
            writer = FunctionWriter(user_function(head, (base,), what="sink"), head)
        except ConfigurationError as err:
            raise ConfigurationError(f"{err}; other sinks are {known}") from err
    return Sink(_name(head), writer, changes=only == "changes", waiting_max=queue)


def writes_stdout(text: str) -> bool:
    """Whether the sink of that word is standard output."""
    return text.partition("?")[0] == "-"


def _stdout(_word: Word, _base: Path) -> Writer:
    return StreamWriter(sys.stdout.buffer)


def _file(word: Word, base: Path) -> Writer:
    if not word.rest:
        raise word.fault("expected a file, as in jsonl:answers.jsonl")
    path = base / Path(word.rest).expanduser()
    if path.is_dir():
        raise word.fault("expected a file, got a folder")
    return FileWriter(path, word.whole("max_mb", SIZE_MAX_MB) * 1_000_000)


def topic_writer(word: Word, base: Path, *, confirmed: bool = False) -> Writer:
    """The writer of `mqtt://HOST/TOPIC`; it connects in the background.

    Args:
        base: the path of `ca` starts there.
        confirmed: rows count as written once the broker has said that it has them.
    Raises: ConfigurationError saying which part of the word is wrong.
    """
    from edge_sdk.pipeline.sinks.topic import TopicWriter  # noqa: PLC0415 - as above
    from edge_sdk.wire.broker_address import BrokerAddress  # noqa: PLC0415 - paho, which other sinks do not need

    found = _BROKER.fullmatch(word.rest)
    topic = "" if found is None else found["topic"]
    if found is None or "+" in topic or "#" in topic or len(topic.encode()) > 1000:
        raise word.fault(f"expected a host and a topic without + and #, as in {_MQTT}")
    address = BrokerAddress.parse(f"{word.kind}://{found['login'] or ''}{found['host']}")
    qos = word.whole("qos", 1, least=0)
    if qos > 1:
        raise word.fault(f"qos: expected 0 or 1, got {qos}")
    retain = word.options.get("retain", "false")
    if retain not in ("true", "false"):
        raise word.fault(f"retain: expected true or false, got {retain}")
    ca = word.options.get("ca")
    return TopicWriter(
        address,
        topic,
        qos=qos,
        retain=retain == "true",
        ca=None if ca is None else str(base / Path(ca).expanduser()),
        confirmed=confirmed,
    )


def _name(head: str) -> str:
    """The sink for people: a login stays out of logs."""
    if head == "-":
        return "standard output"
    return without_login(head)


_MQTT: Final = "mqtt://HOST/TOPIC"
_TOPIC_KEYS: Final = ("qos", "retain")

SINKS: Final[Mapping[str, Kind]] = {
    "-": Kind("-", "JSON lines on standard output", (), _stdout),
    "jsonl": Kind("jsonl:FILE", "JSON lines at the end of a file", ("max_mb",), _file),
    "mqtt": Kind(_MQTT, "a message for each answer at your own broker", _TOPIC_KEYS, topic_writer),
    "mqtts": Kind("mqtts://HOST/TOPIC", "the same over TLS", (*_TOPIC_KEYS, "ca"), topic_writer),
}
