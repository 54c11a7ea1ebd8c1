"""A picture of one page of a running server's dashboard, for the tutorial.

    python -m benchmarks.dashboard.tutorial_pictures alerts drift --state clothes/server

Type the tutorial (docs/tutorial.md) up to the step, then this command: it signs in by a link of its
own, and writes docs/pictures/tutorial-NAME.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import Browser

from benchmarks.dashboard.browser import chromium
from benchmarks.dashboard.pictures import DESK, shrink
from benchmarks.reports import ROOT
from server.dashboard.links import sign_in_url
from server.run import Addresses
from server.state import existing_registry


def main(
    page: Annotated[str, typer.Argument(help="Page of the dashboard, such as alerts.")],
    name: Annotated[str, typer.Argument(help="Last part of the picture's name.")],
    state: Annotated[Path, typer.Option(help="State folder of the server, which runs.")],
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = ROOT / "docs" / "pictures",
) -> None:
    """Take the picture."""
    addresses = Addresses.load(state)
    if addresses is None:
        raise typer.BadParameter(f"{state}: no server has run there; start it first")
    path = out / f"tutorial-{name}.png"
    with chromium() as browser:
        _take(browser, f"http://{addresses.http}/", state, page, path)
    shrink(path)
    typer.echo(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def _take(browser: Browser, url: str, state: Path, words: str, path: Path) -> None:
    width, height = DESK
    page = browser.new_page(viewport={"width": width, "height": height // 2})
    with existing_registry(state) as registry:
        page.goto(sign_in_url(url, registry.sign_ins.new_link("anna")))
    page.get_by_role("heading", name="Fleet").wait_for()
    page.evaluate("words => { location.hash = words }", f"#/{words}")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(800)  # charts are drawn in the next frames
    page.screenshot(path=path)
    page.close()


if __name__ == "__main__":
    typer.run(main)
