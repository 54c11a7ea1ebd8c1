"""The report: a table for each attack, and the picture of rebuilt images."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.privacy.images import Pictures
from benchmarks.privacy.worlds import Trial, World
from benchmarks.reports import made_by, write
from edge_sdk.durable import make_folder

_COLUMNS: Final[Mapping[str, Mapping[str, tuple[str, float, int]]]] = {
    "images": {
        "accuracy": ("accuracy, %", 100, 1),
        "mse": ("MSE", 1, 4),
        "ssim": ("SSIM", 1, 3),
        "psnr": ("PSNR, dB", 1, 1),
    },
    "labels": {
        "read": ("labels read, %", 100, 1),
        "auc": ("AUC", 1, 3),
        "auc_norm": ("AUC by norm", 1, 3),
    },
    "members": {
        "accuracy": ("accuracy, %", 100, 1),
        "epsilon": ("epsilon", 1, 0),
        "auc": ("AUC", 1, 3),
        "true_rate": ("found at 1 % false, %", 100, 1),
    },
}
_TITLES: Final = {
    "images": "Images rebuilt from smashed data",
    "labels": "Labels read from returned gradients",
    "members": "Members found by their loss",
}
_ABOUT: Final = {
    "images": """\
A low SSIM or PSNR and a high MSE mean that little leaks. The attacker has the prefix and half of
the test images, and trains a decoder. Without smashed data, the mean image has an MSE of
{mse_blind:.4f} and an SSIM of {ssim_blind:.3f}.""",
    "labels": """\
The attacker has ten labelled gradients of each class; for gradients of logits it needs none. Noise
is the expected squared norm on one sample, as a multiple of that of the batch's largest gradient
(`noise` of HARMONY). An AUC of 0.5 is guessing.""",
    "members": """\
The attacker has samples with their labels, half of them members, and the network's answers. An AUC
of 0.5 and 1 % found are guessing. Epsilon is a client's, at delta 1e-5 (decision 0008).""",
}


def write_report(
    path: Path,
    about: Mapping[str, Any],
    world: World,
    trials: Sequence[Trial],
    pictures: Pictures,
) -> None:
    """Write PATH.json, PATH.md and, with rebuilt images, PATH.png.

    Raises: StorageError.
    """
    blocks = [
        f"# What leaks: {world.data}",
        (
            f"{made_by(about)} `{world.scale.backbone}`, ten clients,"
            f" seeds {', '.join(str(seed) for seed in sorted({trial.seed for trial in trials}))}."
            " Figures are means over seeds, ± standard deviation."
        ),
    ]
    for part in _COLUMNS:
        of_part = [trial for trial in trials if trial.part == part]
        if of_part:
            blocks += _section(part, of_part)
    if pictures.rows:
        make_folder(path.parent)
        draw(path.with_suffix(".png"), pictures)
        blocks.append(f"![Inputs and rebuilt images]({path.name}.png)")
    scale = asdict(world.scale)
    found = dict(about) | {"scale": scale, "trials": [trial.to_dict() for trial in trials]}
    write(path, found, blocks)


def draw(path: Path, pictures: Pictures) -> None:
    """Rows of images, the inputs first, as one picture."""
    count = max(len(images) for images in pictures.rows.values())
    figure = Figure(figsize=(count + 4, len(pictures.rows)), dpi=60)
    axes = figure.subplots(len(pictures.rows), count, squeeze=False)
    for line, (name, images) in zip(axes, pictures.rows.items(), strict=True):
        for axis, image in zip(line, images, strict=True):
            shown = image.permute(1, 2, 0) if image.shape[0] == 3 else image[0]
            axis.imshow(shown.clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_axis_off()
        line[0].text(-0.3, 0.5, name, transform=line[0].transAxes, ha="right", va="center")
    figure.subplots_adjust(left=0.42, right=0.99, top=0.99, bottom=0.01)
    figure.savefig(path)


def _section(part: str, trials: Sequence[Trial]) -> list[str]:
    text = _ABOUT[part]
    if part == "images":
        names = ("mse_blind", "ssim_blind")
        blind = {name: statistics.fmean(t.figures[name] or 0 for t in trials) for name in names}
        text = text.format(**blind)
    columns = _COLUMNS[part]
    lines = [
        f"| attacked | {' | '.join(head for head, _, _ in columns.values())} |",
        f"| {' | '.join(['---'] * (len(columns) + 1))} |",
    ]
    whys = []
    for name in dict.fromkeys(trial.name for trial in trials):
        own = [trial for trial in trials if trial.name == name]
        cells = [
            _cell((trial.figures[figure] for trial in own), factor, digits)
            for figure, (_, factor, digits) in columns.items()
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
        if own[0].why is not None:
            whys.append(f"{name}: {own[0].why}.")
    return [f"## {_TITLES[part]}", text, "\n".join(lines), *whys]


def _cell(values: Iterable[float | None], factor: float, digits: int) -> str:
    there = [factor * value for value in values if value is not None]
    if not there:
        return "none"
    mean = f"{statistics.fmean(there):,.{digits}f}"
    return mean if len(there) < 2 else f"{mean} ± {statistics.stdev(there):,.{digits}f}"
