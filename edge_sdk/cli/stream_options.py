"""Options of `splitedge agent run` that connect a source and sinks, or keep inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_sdk.cli.times import length_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from edge_sdk.agent import EdgeAgent
    from edge_sdk.home_assistant.address import HomeAddress
    from edge_sdk.kept.keeper import Keeper
    from edge_sdk.pipeline.stream import Stream
    from edge_sdk.settings_file.home_table import HomeTable
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
        metavar="SECONDS",
        parser=length_in("s"),
        help="Shortest time between two inputs of the source, such as 5 or 10m; default: none.",
    ),
]

Home = Annotated[
    str | None,
    typer.Option(
        "--home-assistant",
        metavar="mqtt://[USER:PASSWORD@]HOST",
        help="Appear in Home Assistant with the answer, its confidence and source, the exit rate, "
        "health, and a switch for offloading: the URL of its MQTT broker, with options as in "
        "'mqtt://HOST?name=Door&every=30'; see docs/home-assistant.md. Other users of the machine "
        "can read options: put a broker's password into the table home_assistant of agent.toml.",
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
        self,
        agent: EdgeAgent,
        file: StreamTable,
        state: Path,
        *,
        on_end: Callable[[], None],
        on_row: Callable[[dict[str, Any]], None],
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
            on_row=on_row,
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


def home_address(option: str | None, file: HomeTable, state: Path) -> HomeAddress | None:
    """The address of Home Assistant's broker; None unless the option or the file names one.

    Raises: ConfigurationError saying which part is wrong.
    """
    text = option or file.broker
    if text is None:
        return None
    from edge_sdk.home_assistant.address import HomeAddress

    return HomeAddress.parse(text, Path.cwd() if option else state.absolute())


def report_home(
    address: HomeAddress | None, agent: EdgeAgent, parts: ExitStack
) -> Callable[[dict[str, Any]], None]:
    """Report the agent to Home Assistant until `parts` end; without an address, do nothing.

    Returns: what takes the rows of a stream, whose smoothed labels are shown.
    Raises: ConfigurationError for a certificate file that cannot be used.
    """
    if address is None:
        return lambda _: None
    from edge_sdk.home_assistant.reporter import HomeReporter

    reporter = parts.enter_context(HomeReporter(agent, address))
    agent.add_observer(reporter)
    return reporter.smoothed
