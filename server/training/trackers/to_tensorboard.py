"""Event files of TensorBoard, a folder for each training."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from edge_sdk.durable import make_folder
from edge_sdk.errors import StorageError
from server.training.trackers.runs import TrackedRun

# marks the files that a later export of the same training replaces
SUFFIX: Final = ".splitedge"


def write_events(run: TrackedRun, folder: Path) -> Path:
    """Write the event file of a training into `folder`/NAME, in place of an earlier one of ours.

    `round/...` has a step for each round, `final/...` one step, and the recipe is a text.

    Returns: the training's folder.
    Raises: StorageError.
    """
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow

    target = folder / run.name
    make_folder(target)
    earlier = list(target.glob(f"events.out.tfevents.*{SUFFIX}"))
    try:
        with SummaryWriter(str(target), filename_suffix=SUFFIX) as writer:
            lines = (f"| {key} | {value} |" for key, value in run.parameters.items())
            writer.add_text("recipe", "\n".join(["| key | value |", "| --- | --- |", *lines]))
            for number, figures in run.rounds:
                for name, value in figures.items():
                    writer.add_scalar(f"round/{name}", value, number)
            for name, value in run.final.items():
                writer.add_scalar(f"final/{name}", value, run.last_round)
        for path in earlier:
            path.unlink()
    except OSError as err:
        raise StorageError(f"{target}: cannot write the events ({err})") from err
    return target
