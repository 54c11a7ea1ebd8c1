"""A network with a bottleneck at a cut is published as any: parity is required of every graph."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch

from edge_sdk.manifest import BundleManifest
from edge_sdk.nets import Supernet
from edge_sdk.nets.bottleneck import add_bottleneck
from edge_sdk.training.data.load import Dataset
from exporters.model import export_model


def test_a_narrowed_cut_is_exported_with_its_few_channels(
    tiny: Supernet, digits: Dataset, tmp_path: Path
) -> None:
    net = deepcopy(tiny)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        add_bottleneck(net, 2, 4)
    manifest = export_model(
        net,
        digits.x_test,
        digits.y_test,
        tmp_path,
        name="narrow",
        version=1,
        class_names=digits.class_names,
        depths=(2,),
        int8="never",
    )
    (variant,) = manifest.variants
    bundle = BundleManifest.load(tmp_path / "narrow" / "1" / "bundles" / variant)
    assert bundle.smashed.shape == (4, 4, 4)  # tiny has (16, 4, 4) there
