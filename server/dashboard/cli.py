"""`splitedge server dashboard-link`: a link that signs one person in to the dashboard."""

from __future__ import annotations

from typing import Annotated

import typer

from edge_sdk.cli.output import print_json
from edge_sdk.cli.times import seconds
from server.options import STATE_DEFAULT, AsJson, State


def dashboard_link(
    state: State = STATE_DEFAULT,
    name: Annotated[
        str | None,
        typer.Option(help="Whom it is for; the audit log then says operator:NAME or reader:NAME."),
    ] = None,
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only", help="All pages, and no action: the server refuses every change."
        ),
    ] = False,
    expires: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", parser=seconds, help="Valid for so long: 90s, 1h; default 15m."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="URL of the dashboard, if it is not the server's own: that of a proxy."),
    ] = None,
    sign_out: Annotated[
        bool, typer.Option("--sign-out", help="First end all sessions and unused links.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a link that signs one person in to the dashboard, once."""
    from edge_sdk.errors import ConfigurationError
    from server.dashboard.links import read_page_url, sign_in_url
    from server.registry.sign_in.sign_ins import LINK_S
    from server.state import existing_registry

    with existing_registry(state) as registry:
        page = f"{url.rstrip('/')}/" if url else read_page_url(state)
        if page is None:
            raise ConfigurationError(
                f"{state}: no server has run there with the dashboard; give --url, or start it"
            )
        if sign_out:
            registry.sign_ins.end_all()
        ttl_s = LINK_S if expires is None else expires
        secret = registry.sign_ins.new_link(name, ttl_s, reads_only=read_only)
        link = sign_in_url(page, secret)
    if as_json:
        print_json({"link": link, "expires_in_s": ttl_s})
    else:
        typer.echo(link)
