"""Installation trials: containers, and services of a systemd that has booted.

    make installations

Writes installations.json and .md into benchmarks/results/. It needs root, Debian with its archive,
pip's registry, and `apt install debootstrap podman runc systemd-container`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from benchmarks.install import booted, containers
from benchmarks.install.debian import Registry, make_tree
from benchmarks.install.digits import SAMPLES, export_digits, threshold_of_a_quarter
from benchmarks.reports import RESULTS, ROOT, Results, made_by, provenance, write

FOLDER: Final = ROOT / ".ci" / "installations"


def main(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Systems and images; they are made if missing.")
    ] = FOLDER,
    results: Results = RESULTS,
) -> None:
    """Build and use the images, then install the services into a booted system and try them."""
    if os.geteuid() != 0:
        raise SystemExit("make installations mounts and changes root: run it as root")
    debian = folder / "debian"
    make_tree(debian)
    podman = containers.Podman(folder / "podman")
    podman.clear()
    containers.import_base(podman, debian)
    registry = Registry.of_this_machine()
    images = [containers.build(podman, kind, registry, folder) for kind in containers.KINDS]
    with tempfile.TemporaryDirectory(prefix="splitedge-installations-") as text:
        models, inputs, program = (Path(text) / each for each in ("models", "x.npy", "program"))
        samples = export_digits(models)
        np.save(inputs, samples)
        threshold = threshold_of_a_quarter(models, samples)
        used = Facts("containers")
        containers.use(podman, models, inputs, threshold, used.note)
        containers.take_program(podman, "server", program)
        booted.prepare(debian, folder / "booted", program)
        system = booted.Booted(folder / "booted", folder / "booted.log")
        served = Facts("services")
        with system:
            booted.use(system, models, inputs, threshold, served.note)
    report = {
        "command": "make installations",
        **provenance(),
        "podman": podman.version,
        "systemd": system.version,
        "control_groups": 1 if booted.MEMORY_V1.is_dir() else 2,
        "images": {each.name: asdict(each) for each in images},
        "containers": used.found,
        "services": served.found,
    }
    write(results / "installations", report, page(report))


class Facts:
    """Facts of a trial, printed as they are found.

    Attributes:
        found: what was tried, and what came out.
    """

    def __init__(self, trial: str) -> None:
        self._trial = trial
        self.found: dict[str, str] = {}

    def note(self, what: str, outcome: str) -> None:
        """Add one."""
        self.found[what] = outcome
        typer.echo(f"{self._trial}: {what}: {outcome}")


def page(report: Mapping[str, Any]) -> list[str]:
    """The report's text."""
    images = [
        f"| `{name}` | {each['size_bytes'] / 1e6:.0f} |" for name, each in report["images"].items()
    ]
    return [
        "# Containers and services",
        (
            f"Podman {report['podman']} built `deploy/*.Dockerfile` as they are; the image they"
            " start from was made of Debian bookworm's own Python. The commands, privileges and"
            " volumes of the containers are those of `deploy/compose.yaml` and"
            " [docs/install-docker.md](../../docs/install-docker.md). PostgreSQL, Prometheus and"
            " Grafana were not started, so the registry is SQLite. Other work ran on the machine's"
            " two cores beside it, so the times are upper limits."
        ),
        "\n".join(["| image | size, MB |", "|---|---|", *images]),
        _table("in containers", report["containers"]),
        (
            f"The same program in a Debian bookworm that systemd {report['systemd']} has booted by"
            " systemd-nspawn, with the commands of [docs/services.md](../../docs/services.md);"
            f" control groups of version {report['control_groups']}. The answers are to"
            f" {SAMPLES} inputs, of which a quarter is above the threshold of the gate."
        ),
        _table("as services", report["services"]),
        made_by(report),
    ]


def _table(head: str, facts: Mapping[str, str]) -> str:
    rows = [f"| {what} | {outcome} |" for what, outcome in facts.items()]
    return "\n".join([f"| {head} | |", "|---|---|", *rows])


if __name__ == "__main__":
    typer.run(main)
