"""Settings of what an offload sends: its codec, and a bottleneck in front of it.

A recipe has them as its table `[export]`, the record of a run keeps them, and the options
`--codec` and `--bottleneck` override them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from edge_sdk.checks import check_fields
from edge_sdk.manifest import CODECS
from profiles.checks import Check, is_whole, one_of

Narrow = int | Literal["auto", "never"]

CODEC_WORDS: Final = ("auto", "smallest", *CODECS)
_WIDTH: Final = Check(
    "a number of channels, auto or never",
    lambda value: value in ("auto", "never") or (is_whole(value) and value > 0),
)


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Codec and bottleneck of the offloads of an exported model.

    Attributes:
        codec: `auto`, `smallest`, or the name of a codec (`exporters.parity.choose_codec`).
        bottleneck: its channels, `auto`, or `never` (`exporters.offloads.bottleneck`).
    """

    codec: str = "auto"
    bottleneck: Narrow = "never"

    def __post_init__(self) -> None:
        check_fields(self, codec=one_of(CODEC_WORDS), bottleneck=_WIDTH)
