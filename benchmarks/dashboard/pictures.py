"""Pictures of the dashboard for the documents, made of a fleet of simulated devices.

    python -m benchmarks.dashboard.pictures                  into docs/pictures

The server is the real one, its model is trained on the digits, and accuracy and bytes of the rounds
are those of a committed report. The devices and their past are drawn (simulated.py).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from PIL import Image
from playwright.sync_api import Browser

from benchmarks.dashboard.browser import chromium
from benchmarks.dashboard.world import (
    fill,
    make_models,
    make_training,
    members,
    wait_for_alerts,
)
from benchmarks.reports import RESULTS, ROOT
from server.alerts.limits import ALERTS_NAME
from server.dashboard.links import sign_in_url
from server.processes import ServerProcess
from server.state import existing_registry

# by the picture's name: the page's address, the sizes of the window, and whether it is dark
DESK: Final = (1280, 860)
TALL: Final = (1280, 1180)
PHONE: Final = (390, 844)
PICTURES: Final = {
    "fleet": ("fleet", DESK, False),
    "device": ("device/porch-cam", TALL, False),
    "models": ("models", DESK, False),
    "rollouts": ("rollouts", DESK, False),
    "training": ("training", TALL, False),
    "alerts": ("alerts", DESK, False),
    "audit": ("audit", DESK, False),
    "fleet-phone": ("fleet", PHONE, True),
}
COLOURS: Final = 128  # of a palette, which keeps a picture under 150 kB


def main(
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = ROOT / "docs" / "pictures",
) -> None:
    """Make the pictures."""
    with tempfile.TemporaryDirectory(prefix="splitedge-pictures-") as work:
        state = Path(work) / "server"
        make_models(state / "models")
        fleet = members()
        names = [member.name for member in fleet]
        # drawn answers are no drift of inputs
        (state / ALERTS_NAME).write_text("drift_distance = 1\n", encoding="ascii")
        make_training(state, RESULTS / "training-availability.json", names)
        server = ServerProcess(state)
        options = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")
        server.start((*options, "--new-versions", "hold"))
        try:
            fill(state, fleet)
            wait_for_alerts(state)
            with chromium() as browser:
                _take(browser, server.http, state, out)
        finally:
            server.stop()


def _take(browser: Browser, http: str, state: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, (words, (width, height), dark) in PICTURES.items():
        context = browser.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=2 if width < 500 else 1,
            color_scheme="dark" if dark else "light",
        )
        page = context.new_page()
        with existing_registry(state) as registry:
            page.goto(sign_in_url(f"{http}/", registry.sign_ins.new_link("anna")))
        page.get_by_role("heading", name="Fleet").wait_for()
        page.evaluate("words => { location.hash = words }", f"#/{words}")
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(800)  # charts are drawn in the next frames
        path = out / f"dashboard-{name}.png"
        page.screenshot(path=path)
        context.close()
        shrink(path)
        typer.echo(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def shrink(path: Path) -> None:
    """Write a picture again with a palette of COLOURS, in less space."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    work = path.with_suffix(".part")
    small.save(work, format="PNG", optimize=True)
    shutil.move(work, path)


if __name__ == "__main__":
    typer.run(main)
