"""Options of `splitedge agent run` and `splitedge server run` that send traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edge_sdk.settings import Traces

TracesUrl = Annotated[
    str | None,
    typer.Option(
        "--traces",
        metavar="URL",
        help="Send traces to the collector of OpenTelemetry at this URL, such as "
        "http://collector:4318; 'env' takes that of OTEL_EXPORTER_OTLP_ENDPOINT. It needs the "
        "extra `traces`; see docs/traces.md. Default: no traces.",
    ),
]
TracesShare = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of the predictions (on a server, of the queries that bring no trace of their "
        "own) that are traced, from 0 to 1; default: 0.01.",
    ),
]


def chosen_traces(url: str | None, share: float | None, file: Traces | None) -> Traces | None:
    """The settings of traces, with the options before those of a settings file; None for no traces.

    Raises: ConfigurationError for values that cannot be, or a share without a collector.
    """
    from edge_sdk.errors import ConfigurationError  # noqa: PLC0415 - a command is quick to load
    from edge_sdk.settings import TRACES_SHARE, Traces  # noqa: PLC0415

    url = url or (None if file is None else file.url)
    if url is None:
        if share is not None:
            raise ConfigurationError("--traces-share needs --traces URL: where are they sent to?")
        return None
    if share is None:
        share = TRACES_SHARE if file is None else file.share
    return Traces(url, share)
