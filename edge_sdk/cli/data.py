"""`splitedge agent data`: what a word of DATA reads, before anything trains on it."""

from __future__ import annotations

from typing import Annotated

import typer

from edge_sdk.cli.agent_options import AsJson
from edge_sdk.cli.data_options import HELD_OUT, HeldOut, Resize
from edge_sdk.cli.output import print_json


def data(
    word: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="digits, fashion-mnist=DIR, cifar-10=DIR, cifar-100=DIR, cinic-10=DIR, emnist=DIR,"
            " tiny-imagenet=DIR, imagenette=DIR, isic=DIR, ham10000=DIR, uci-har=DIR, a folder of"
            " pictures, FILE.npz, 'csv:FILE?window=ROWS' or module:function.",
        ),
    ],
    held_out: HeldOut = HELD_OUT,
    resize: Resize = None,
    labelled: Annotated[
        bool, typer.Option("--labelled", help="Refuse samples without labels, as training does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what DATA reads: samples, shape, classes, and the parts that every command makes of it.

    Files and lines that cannot be read are named, skipped and counted.
    """
    from edge_sdk.training.data.load import (
        described,
        labelled_dataset,
        open_data,
        split_samples,
        with_resize,
    )

    samples = open_data(with_resize(word, resize))
    if labelled:
        sizes = labelled_dataset(samples, held_out=held_out).sizes
    else:
        sizes = split_samples(samples, held_out=held_out).sizes
    if not as_json:
        typer.echo(described(samples, sizes))
        return
    x = samples.train.x
    print_json(
        {
            "name": samples.name,
            "samples": sizes,
            "shape": list(x.shape[1:]),
            "dtype": str(x.dtype),
            "labelled": samples.train.y is not None,
            "class_names": list(samples.class_names),
            "skipped": samples.skipped,
        }
    )
