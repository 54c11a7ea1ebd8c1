"""The random streams of training, and the keys that keep them apart.

Random numbers come from numpy, from a key of whole numbers: the recipe's seed, the purpose of the
draw, and its place in the training. So there is no generator to save, and a resumed run or another
transport draws the same numbers. (First weights come from torch, by the seed alone.)

numpy pads a key with zeros, so two keys that differ in zeros at the end are the same key.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import Final
from zlib import crc32

import numpy as np

# rounds, steps, starts and indices are below it, and all marks in second place are above it
LIMIT: Final = 1 << 22


@unique
class Stream(Enum):
    """Purposes of random draws. A value is the key without its first word.

    The first word is the recipe's seed, which the server knows; for noise it is the client's
    secret. A number in the value marks the stream. A name stands for a word that each draw gives: a
    client by name, which enters the key as its CRC-32, anything else as a number below LIMIT.
    """

    # On the client, for each round
    BATCHES = ("round", "client")
    SECOND_BATCHES = (0x62617463, "round", "client")
    DROPOUT = (0x64726F70, "round", "client", "step")
    SYNTHETIC = (0x73796E74, "round", "client")
    # On the client, from its secret
    FEATURE_NOISE = ("client", "round", "start", 0x7A, "index")
    UPDATE_NOISE = ("client", "round", "start", 0x75, "index")
    ANSWER_NOISE = ("client", "round", "start", 0x6E6F6973, "step")
    # On the server, for each round
    PARTICIPANTS = ("round", 1)
    SUPERVISION = ("round", 2)
    EXCHANGE = ("round", "step", "client")
    # Before and after training
    PARTITION = (0x70617274,)
    HELD_OUT = (0x68656C64,)
    LOCAL_SPLIT = (0x73706C69, "index")
    DRIFT = (0x73706C69, "index", 1)
    UNSEEN_CLASSES = (0x72686F, "index")
    FLEET = (0x70726F66,)
    FINE_TUNING = (0x66696E65, "client")
    REFIT = (0x72656669, "client")

    def generator(self, first: int, **words: int | str) -> np.random.Generator:
        """A new generator at the start of the stream.

        Args:
            first: the seed, or for noise the client's secret.
            words: a value for each name in the key.
        """
        names = [word for word in self.value if isinstance(word, str)]
        assert words.keys() == set(names), f"{self.name} is keyed by {names}, got {sorted(words)}"
        key = [first]
        for word in self.value:
            value = words[word] if isinstance(word, str) else word
            key.append(crc32(value.encode()) if isinstance(value, str) else value)
        return np.random.default_rng(key)
