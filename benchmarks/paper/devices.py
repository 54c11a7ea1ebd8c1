"""Whether a GPU trains as the CPU does: the weights after three rounds, on the same seed.

    python -m benchmarks.paper.devices --device cuda

The command for the tables asks this before its first row on a GPU, for every method of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Final

import torch
import typer
from torch import Tensor

from benchmarks.compare import train
from benchmarks.paper.recipes import job_of
from benchmarks.paper.tables.catalog import TABLES
from edge_sdk.errors import ConfigurationError, SplitedgeError
from server.training.run.run import Simulation

ROUNDS: Final = 3
# Sums in another order differ by some 1e-7 of a weight a step.
LIMIT: Final = 1e-4

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.paper.devices --device cuda")
def devices(
    device: Annotated[str, typer.Option(help="Compared with the CPU.")] = "cuda",
) -> None:
    """Train the rows of all tables for three rounds on the CPU and on a device, and compare."""
    tables = [name for name in TABLES if "smoke" in TABLES[name].scales]
    try:
        check_agreement(tables, device, say=typer.echo)
    except SplitedgeError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(1) from None


def check_agreement(
    tables: Iterable[str], device: str, say: Callable[[str], None] = lambda _: None
) -> None:
    """Check that a device trains the rows of these tables as the CPU does, at smoke scale.

    From then on, no GPU rounds fp32 to the 10 bits of TF32, as its convolutions do by default.

    Args:
        say: receives a line for each row.
    Raises: ConfigurationError naming the first row whose weights differ by more than `LIMIT`.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in tables:
        for row in TABLES[name].rows:
            recipe = job_of(name, TABLES[name], row, "smoke").recipe
            training = replace(recipe.train.training, memory_format="contiguous")
            recipe = replace(recipe, train=replace(recipe.train, rounds=ROUNDS, training=training))
            ours, cpus = (train(recipe, each)[0] for each in (device, "cpu"))
            apart = farthest_weights(ours, cpus)
            say(f"{name}: {row.name}: weights differ by {apart:.1e} at most")
            if not apart <= LIMIT:
                raise ConfigurationError(
                    f"--device {device}: {name}: {row.name}: expected weights within {LIMIT:g} of"
                    f" the CPU's after {ROUNDS} rounds, got {apart:.1e}; use --device cpu"
                )


def farthest_weights(one: Simulation, other: Simulation) -> float:
    """Largest difference of a weight of two runs: of the server's, and of those clients keep."""
    first, second = _weights(one), _weights(other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def _weights(run: Simulation) -> dict[str, Tensor]:
    found = {f"net/{name}": tensor for name, tensor in run.state.read().items()}
    for client, own in run.personal().items():
        found |= {f"{client}/{name}": tensor for name, tensor in own.items()}
    return {
        name: tensor.detach().cpu().double() for name, tensor in found.items() if tensor.numel()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
