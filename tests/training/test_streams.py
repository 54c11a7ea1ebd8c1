"""Random streams: the draws that they have always given, and no key that serves two of them."""

from __future__ import annotations

from itertools import combinations
from zlib import crc32

import numpy as np
import pytest

from edge_sdk.training.streams import LIMIT, Stream

ADA = crc32(b"ada")
# every key by hand, as the code had it before the streams stood in one place
KEYS: dict[Stream, tuple[list[int], dict[str, int | str]]] = {
    Stream.BATCHES: ([7, 3, ADA], {"round": 3, "client": "ada"}),
    Stream.SECOND_BATCHES: ([7, 0x62617463, 3, ADA], {"round": 3, "client": "ada"}),
    Stream.DROPOUT: ([7, 0x64726F70, 3, ADA, 2], {"round": 3, "client": "ada", "step": 2}),
    Stream.SYNTHETIC: ([7, 0x73796E74, 3, ADA], {"round": 3, "client": "ada"}),
    Stream.FEATURE_NOISE: (
        [7, ADA, 3, 1, 0x7A, 5],
        {"client": "ada", "round": 3, "start": 1, "index": 5},
    ),
    Stream.UPDATE_NOISE: (
        [7, ADA, 3, 1, 0x75, 5],
        {"client": "ada", "round": 3, "start": 1, "index": 5},
    ),
    Stream.ANSWER_NOISE: (
        [7, ADA, 3, 1, 0x6E6F6973, 2],
        {"client": "ada", "round": 3, "start": 1, "step": 2},
    ),
    Stream.PARTICIPANTS: ([7, 3, 1], {"round": 3}),
    Stream.SUPERVISION: ([7, 3, 2], {"round": 3}),
    Stream.EXCHANGE: ([7, 3, 2, ADA], {"round": 3, "step": 2, "client": "ada"}),
    Stream.PARTITION: ([7, 0x70617274], {}),
    Stream.LOCAL_SPLIT: ([7, 0x73706C69, 4], {"index": 4}),
    Stream.DRIFT: ([7, 0x73706C69, 4, 1], {"index": 4}),
    Stream.UNSEEN_CLASSES: ([7, 0x72686F, 4], {"index": 4}),
    Stream.HELD_OUT: ([7, 0x68656C64], {}),
    Stream.FLEET: ([7, 0x70726F66], {}),
    Stream.FINE_TUNING: ([7, 0x66696E65, ADA], {"client": "ada"}),
    Stream.REFIT: ([7, 0x72656669, ADA], {"client": "ada"}),
}
SECRET = {Stream.FEATURE_NOISE, Stream.UPDATE_NOISE, Stream.ANSWER_NOISE}


@pytest.mark.parametrize("stream", Stream)
def test_a_stream_draws_from_its_key_by_hand(stream: Stream) -> None:
    key, words = KEYS[stream]
    drawn = stream.generator(7, **words).random(5)
    assert drawn.tolist() == np.random.default_rng(key).random(5).tolist()


def may_be(one: int | str | None, other: int | str | None) -> bool:
    """Whether two words of a key can be the same number; None is the 0 that numpy adds.

    The CRC-32 of a client's name is taken for no small number and no mark: that one name of a
    fleet hits one of them has a chance of one in billions.
    """
    if "client" in (one, other):
        return one == other
    if isinstance(one, str) and isinstance(other, str):
        return True
    if isinstance(one, str) or isinstance(other, str):
        number = other if isinstance(one, str) else one
        return (number or 0) < LIMIT  # type: ignore[operator]  # the other one is the name
    return (one or 0) == (other or 0)


def padded(stream: Stream) -> list[int | str | None]:
    words = list(stream.value)
    return [*words, *[None] * (6 - len(words))]


def test_no_two_streams_share_a_key() -> None:
    alike = [
        (one.name, other.name)
        for one, other in combinations(Stream, 2)
        if (one in SECRET) == (other in SECRET) and all(map(may_be, padded(one), padded(other)))
    ]
    assert alike == []


def test_a_draw_names_every_word_of_its_key() -> None:
    with pytest.raises(AssertionError, match="keyed by"):
        Stream.DROPOUT.generator(7, round=3, client="ada")
    with pytest.raises(AssertionError, match="keyed by"):
        Stream.PARTITION.generator(7, round=3)
