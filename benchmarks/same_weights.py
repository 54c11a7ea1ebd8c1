"""Digests of the final weights of every recipe: two files tell whether a change kept all bits.

    python -m benchmarks.same_weights record before.json --data DIR    # in the checkout before
    python -m benchmarks.same_weights record after.json --data DIR     # in the checkout after
    python -m benchmarks.same_weights compare before.json after.json

The recipes of the digits run in full, the others for two rounds. Each tensor of the last checkpoint
has a digest: global weights, momentum, a method's memory, and clients' personal weights.
Figures of the report are compared too, except seconds and joules, which no two runs share.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer
from safetensors.torch import load_file

SHORT_ROUNDS: Final = 2

app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0] if __doc__ else None)


@app.command()
def record(
    out: Annotated[Path, typer.Argument(help="JSON file to write.")],
    data: Annotated[Path, typer.Option(help="Folder with the Fashion-MNIST files.")],
    checkout: Annotated[Path, typer.Option(help="Root of the checkout to run.")] = Path(),
    only: Annotated[str, typer.Option(help="Run only recipes with this text in their name.")] = "",
) -> None:
    """Run the recipes of a checkout and write the digests of their results."""
    found: dict[str, Any] = {}
    recipes = sorted((checkout / "examples" / "recipes").glob("*.toml"))
    for recipe in (path for path in recipes if only in path.stem):
        with tempfile.TemporaryDirectory() as folder:
            found[recipe.stem] = _run(checkout.resolve(), recipe, data.resolve(), Path(folder))
        typer.echo(f"{recipe.stem}: {len(found[recipe.stem]['tensors'])} tensors")
        out.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))


@app.command()
def compare(before: Path, after: Path) -> None:
    """Name the recipes with other weights or figures; the exit status is 1 if there are any."""
    old, new = orjson.loads(before.read_bytes()), orjson.loads(after.read_bytes())
    differing = 0
    for name in sorted(old | new):
        wrong = _differences(old.get(name), new.get(name))
        differing += bool(wrong)
        typer.echo(f"{name}: {'; '.join(wrong) if wrong else 'equal'}")
    typer.echo(f"{len(old | new) - differing} recipes equal, {differing} not")
    raise typer.Exit(1 if differing else 0)


def _run(checkout: Path, recipe: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Train by one recipe, with the code of that checkout."""
    text = recipe.read_text()
    digits = 'name = "digits"' in text
    copy = folder / recipe.name
    copy.write_text(
        text if digits else re.sub(r"(?m)^rounds = \d+", f"rounds = {SHORT_ROUNDS}", text)
    )
    out = folder / "run"
    command = [sys.executable, "-P", "-c", _simulate(checkout), str(copy), "--out", str(out)]
    subprocess.run(
        command if digits else [*command, "--data", str(data)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    last = max((out / "checkpoints").glob("round-*.safetensors"))
    tensors = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
        for name, tensor in sorted(load_file(last).items())
    }
    report = orjson.loads((out / "report.json").read_bytes())
    return {"tensors": tensors, "report": _repeatable(report)}


def _simulate(checkout: Path) -> str:
    """Code that runs the checkout's `splitedge simulate`, whatever version is installed."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["splitedge.commands"]["simulate"].partition(":")
    return f"from {module} import {name}; {name}()"


def _repeatable(value: Any) -> Any:
    """A report without what no two runs share: times, energy, and the path of the weights."""
    if isinstance(value, dict):
        unlike = {"seconds", "energy", "latency", "weights"}
        return {k: _repeatable(v) for k, v in value.items() if k not in unlike}
    if isinstance(value, list):
        return [_repeatable(entry) for entry in value]
    return value


def _differences(old: Any, new: Any) -> list[str]:
    if old is None or new is None:
        return ["the recipe is in one of the two files only"]
    names = old["tensors"].keys() | new["tensors"].keys()
    changed = sorted(n for n in names if old["tensors"].get(n) != new["tensors"].get(n))
    keys = old["report"].keys() | new["report"].keys()
    figures = sorted(k for k in keys if old["report"].get(k) != new["report"].get(k))
    return [f"tensor {name} differs" for name in changed[:3]] + [
        f"report: {key} differs" for key in figures
    ]


if __name__ == "__main__":
    app()
