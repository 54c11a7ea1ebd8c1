"""Options of `splitedge agent run` that connect a source and sinks, or keep inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_sdk.agent import EdgeAgent
    from edge_sdk.kept.keeper import Keeper
    from edge_sdk.pipeline.stream import Stream
    from edge_sdk.settings_file.keep_table import KeepTable
    from edge_sdk.settings_file.stream_table import StreamTable

Source = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="Classify what comes from there: folder:DIR (pictures and .npy files as they arrive), "
        "camera:0 (the newest frame; also a device, a URL or a video file), csv:FILE (windows of a "
        "file that grows), serial:/dev/ttyUSB0 (windows of lines of numbers), - (JSON lines on "
        "standard input), or module:function (a function that yields arrays). Options follow as in "
        "'csv:FILE?columns=ax,ay,az&step=32'; see docs/streams.md.",
    ),
]
Sinks = Annotated[
    list[str] | None,
    typer.Option(
        "--sink",
        metavar="SINK",
        help="Write the answers there; may be given several times. - (JSON lines on standard "
        "output; the default with a source), jsonl:FILE, mqtt://[USER:PASSWORD@]HOST[:PORT]/TOPIC, "
        "mqtts://..., or module:function (called with each answer).",
    ),
]
Smooth = Annotated[
    str | None,
    typer.Option(
        metavar="SMOOTHING",
        help="Smooth the labels of a source: majority:5 or mean:5 over the last 5 answers; "
        "'majority:5?hold=3' changes the label only once another has won 3 times in a row.",
    ),
]
Every = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Shortest time between two inputs of the source; default: none."
    ),
]

Keep = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep inputs that were offloaded or corrected in this folder, the newest 1000 and "
        "100 MB; see docs/kept-inputs.md.",
    ),
]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options that replace settings of the table [stream]; None or nothing leaves the setting."""

    source: str | None = None
    sinks: tuple[str, ...] = ()
    smooth: str | None = None
    every: float | None = None

    def table(self, file: StreamTable) -> StreamTable:
        """The table of the file with the options in their place.

        Raises: ConfigurationError for values that cannot be.
        """
        from dataclasses import replace

        every = file.every if self.every is None else self.every
        return replace(
            file,
            source=self.source or file.source,
            sinks=self.sinks or file.sinks,
            smooth=self.smooth or file.smooth,
            every=every,
        )

    def open(
        self, agent: EdgeAgent, file: StreamTable, state: Path, on_end: Callable[[], None]
    ) -> Stream:
        """The stream, not yet started.

        Paths of the options are relative to the current folder, those of the file to the state
        folder.

        Raises: ConfigurationError naming the word and what is wrong with it.
        """
        from edge_sdk.pipeline.stream import open_stream

        here = Path.cwd()
        return open_stream(
            agent,
            self.table(file),
            state.absolute(),
            source_base=here if self.source else state.absolute(),
            sink_base=here if self.sinks else state.absolute(),
            on_end=on_end,
        )


def open_keeper(folder: Path | None, file: KeepTable, state: Path) -> Keeper | None:
    """The observer that keeps inputs; None unless the option or the file asks for it.

    Args:
        folder: of the option, relative to the current folder; that of the file is relative to the
            state folder.
    Raises: ConfigurationError if the folder cannot be used; StateInUseError if another agent does.
    """
    if folder is None and file.folder is None:
        return None
    from edge_sdk.kept.keeper import Keeper

    place = folder if folder is not None else state / (file.folder or "")
    return Keeper(place.absolute(), file)
