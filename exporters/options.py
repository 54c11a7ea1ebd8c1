"""Options that the commands `export` and `adopt` share."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import CODECS
from exporters.offloads.settings import CODEC_WORDS, Narrow

GATE_HELP: Final = (
    "Uncertainty that exits are judged by: entropy, margin, vacuity-exp for a network that learnt"
    " evidence (vacuity for one of 0.1.0), or several: 'all(entropy, margin)', 'any(...)'. Scales,"
    " as in 'all(entropy:0.3, margin:0.2)', are fitted where they are left out."
)
Version = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Version number; a published version never changes.",
        show_default="the next free",
    ),
]
_CODEC: Final = (
    "Codec of what an offload sends: auto takes the first of int8, fp16 and fp32 that keeps the"
    " server's answers; smallest takes that of all codecs with the fewest bytes that keeps them; or"
    f" one of {', '.join(CODECS)}. Devices of 0.1.0 know fp32, fp16, int8 only."
)
_BOTTLENECK: Final = (
    "Send so few channels in place of z's, and widen them on the server: a number, or auto for the"
    " width with the fewest bytes that keeps the server's answers. It is trained on samples without"
    " labels. Devices of 0.1.0 refuse such bundles."
)
Codec = Annotated[str, typer.Option(metavar="CODEC", help=_CODEC)]
Bottleneck = Annotated[str, typer.Option(metavar="CHANNELS", help=_BOTTLENECK)]
RunCodec = Annotated[
    str | None,
    typer.Option(metavar="CODEC", help=_CODEC, show_default="that of the run's recipe, or auto"),
]
RunBottleneck = Annotated[
    str | None,
    typer.Option(
        metavar="CHANNELS", help=_BOTTLENECK, show_default="that of the run's recipe, or never"
    ),
]


def read_codec(text: str) -> str:
    """The codec that `--codec` names.

    Raises: ConfigurationError naming the words that it takes.
    """
    if text in CODEC_WORDS:
        return text
    raise ConfigurationError(f"--codec: expected one of {', '.join(CODEC_WORDS)}, got {text!r}")


def read_bottleneck(text: str) -> Narrow:
    """The width that `--bottleneck` names.

    Raises: ConfigurationError for anything but a number above 0, `auto` and `never`.
    """
    if text == "auto":
        return "auto"
    if text == "never":
        return "never"
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise ConfigurationError(
        f"--bottleneck: expected a number of channels, auto or never, got {text!r}"
    )
