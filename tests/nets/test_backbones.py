"""The backbones against the papers: exact parameter counts, map sizes, operations.

Networks are built on the meta device here: shapes and counts need no weights.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import NAMES, Supernet, build
from edge_sdk.nets.layers import Norm, grid_pool

GREY: dict[str, Any] = {"input_shape": (1, 28, 28)}
BIG: dict[str, Any] = {"input_shape": (3, 224, 224)}
NORMED = ("densenet121", "har_cnn", "mobilenetv2", "resnet18", "resnet50", "vgg11")

# name, arguments, depth, parameters of prefix, exit head and suffix (None: no figure is known)
CUTS: list[tuple[str, dict[str, Any], int, int, int | None, int | None]] = [
    ("cnn8", {}, 2, 18_816, 5_770, 3_849_354),
    ("cnn8", {}, 4, 387_840, 23_050, 3_480_330),
    ("cnn6", {}, 2, 4_800, 9 * 32 * 10 + 10, 205_194 - 4_800),
    ("cnn6", {}, 3, 23_296, 9 * 64 * 10 + 10, 205_194 - 23_296),
    ("alexnet", {}, 2, 19_392, 5_770, 3_849_354),
    ("vgg11", {}, 2, 76_032, 5_130, 9_155_082),
    ("vgg11", {}, 4, 962_304, 10_250, 8_268_810),
    ("resnet18", {}, 2, 83_520, 650, None),
    ("resnet18", GREY, 2, 77_248, 650, None),
    ("resnet18", {"classes": 1000}, 2, 83_520, 65_000, 11_689_512 - 83_520),
    ("resnet50", {}, 2, 84_544, 51_400, 23_833_288),
    ("resnet50", {}, 6, 884_800, 102_600, 23_033_032),
    ("resnet50", BIG, 6, 884_800, 102_600, 23_033_032),
    ("mobilenetv2", {}, 1, 928, 3_300, 2_351_044),
    ("mobilenetv2", {}, 11, 239_360, 6_500, 2_112_612),
    ("vit_s", {}, 2, 3_920_256, 39_268, 17_783_908),
    ("vit_s", {}, 6, 11_018_112, 39_268, 10_686_052),
    ("densenet121", {"classes": 10}, 1, 344_576, 347_146 - 344_576, None),
    ("densenet121", {}, 1, 344_576, None, 7_978_856 - 344_576),
    ("tiny", {}, 1, 80, 330, 34_282 - 80),
    ("tiny", {}, 2, 1_248, 650, 34_282 - 1_248),
    ("tiny", {}, 3, 5_888, 1_290, 34_282 - 5_888),
    ("tiny", {}, 4, 15_136, 1_290, 34_282 - 15_136),
    # conv without bias, then 2 numbers a channel: 9*32*5 + 64, 32*64*5 + 128
    ("har_cnn", {}, 1, 1_504, 32 * 6 + 6, None),
    ("har_cnn", {}, 2, 1_504 + 10_368, 64 * 6 + 6, None),
]

WHOLE: list[tuple[str, dict[str, Any], int]] = [
    ("cnn6", {}, 205_194),
    ("cnn8", {}, 18_816 + 3_849_354),
    ("alexnet", {}, 3_868_746),
    ("resnet18", {"classes": 1000}, 11_689_512),
    ("densenet121", {}, 7_978_856),
    ("tiny", {}, 34_282),
    # stage 3: 64*128*3 + 256; head: 128*6 + 6
    ("har_cnn", {}, 1_504 + 10_368 + 24_832 + 774),
]

LENGTHS = {
    "alexnet": 5,
    "cnn6": 3,
    "cnn8": 5,
    "densenet121": 7,
    "har_cnn": 3,
    "mobilenetv2": 18,
    "resnet18": 9,
    "resnet50": 17,
    "tiny": 5,
    "vgg11": 8,
    "vit_b": 12,
    "vit_s": 12,
}


@cache
def on_meta(name: str, **arguments: Any) -> Supernet:
    with torch.device("meta"):
        return build(name, **arguments)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "arguments", "depth", "f", "h", "S"), CUTS)
def test_counts_at_a_cut_are_those_of_the_papers(
    name: str, arguments: dict[str, Any], depth: int, f: int, h: int | None, S: int | None
) -> None:
    net = on_meta(name, **arguments)

    assert count(net.prefix(depth)) == f
    assert h is None or count(net.exit_head(depth)) == h
    assert S is None or count(net.suffix(depth)) == S


@pytest.mark.parametrize(("name", "arguments", "whole"), WHOLE)
def test_count_of_the_whole_is_that_of_the_papers(
    name: str, arguments: dict[str, Any], whole: int
) -> None:
    assert count(on_meta(name, **arguments).segment(0, None)) == whole


def test_prefix_and_exit_of_resnet18_add_up_to_besplits_table_8() -> None:
    for shape, total in (((3, 32, 32), 84_170), ((1, 28, 28), 77_898)):
        net = on_meta("resnet18", input_shape=shape)
        assert count(net.prefix(2)) + count(net.exit_head(2)) == total


def test_cnn6_stages_have_the_known_counts() -> None:
    stages = on_meta("cnn6").stages
    assert [count(stages[:depth]) for depth in (1, 2, 3)] == [160, 4_800, 23_296]


def test_vit_b_without_its_last_layer_has_the_known_count() -> None:
    net = on_meta("vit_b", classes=100)
    assert count(net.segment(0, None)) - (768 * 100 + 100) == 85_798_656


def test_every_backbone_has_its_number_of_stages() -> None:
    assert {name: on_meta(name).L for name in NAMES} == LENGTHS


@pytest.mark.parametrize("name", NORMED)
def test_group_norm_does_not_change_the_counts(name: str) -> None:
    with_batch, with_group = on_meta(name), on_meta(name, norm="group")

    assert [count(stage) for stage in with_group.stages] == [
        count(stage) for stage in with_batch.stages
    ]
    assert count(with_group.head) == count(with_batch.head)
    assert not any("BatchNorm" in type(part).__name__ for part in with_group.modules())


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(NORMED)))
def test_a_choice_of_norm_is_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(ConfigurationError, match="it has no such layers"):
        on_meta(name, norm="group")


def test_an_unknown_norm_is_refused() -> None:
    unknown: Norm = "layer"  # type: ignore[assignment]  # what a recipe file might say
    with pytest.raises(ConfigurationError, match="batch or group"):
        on_meta("resnet18", norm=unknown)


@pytest.mark.parametrize("name", NORMED)
def test_group_norm_takes_a_batch_of_one_in_train_mode(name: str) -> None:
    net = build(
        name, norm="group", seed=0, input_shape=(9, 128) if name == "har_cnn" else (3, 32, 32)
    )
    x = torch.randn(1, *net.input_shape, generator=torch.Generator().manual_seed(1))

    logits = net(x)

    assert torch.isfinite(logits).all()
    # A group of one value is its own mean: nothing of the input would be left in the logits.
    assert not torch.equal(logits, net(-x))


# One (channels, side) for each stage, from the papers' architecture tables at 224x224.
MAPS = {
    "resnet18": [(64, 56)] * 3 + [(128, 28)] * 2 + [(256, 14)] * 2 + [(512, 7)] * 2,
    "resnet50": [(64, 56)] + [(256, 56)] * 3 + [(512, 28)] * 4 + [(1024, 14)] * 6 + [(2048, 7)] * 3,
    "mobilenetv2": [(32, 112), (16, 112)]
    + [(24, 56)] * 2
    + [(32, 28)] * 3
    + [(64, 14)] * 4
    + [(96, 14)] * 3
    + [(160, 7)] * 3
    + [(320, 7)],
    "densenet121": [(256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (1024, 7)],
}
SMALL_MAPS = {
    "alexnet": [(32, 16), (64, 8), (128, 8), (256, 8), (256, 3)],
    "cnn6": [(16, 14), (32, 7), (64, 3)],
    "cnn8": [(32, 14), (64, 7), (128, 7), (256, 7), (256, 3)],
    "tiny": [(8, 8), (16, 4), (32, 4), (32, 2), (64, 2)],
    "vgg11": [(64, 16), (128, 8), (256, 8), (256, 4), (512, 4), (512, 2), (512, 2), (512, 1)],
}


@pytest.mark.parametrize("name", [*MAPS, *SMALL_MAPS])
def test_maps_after_each_stage_have_the_size_of_the_table(name: str) -> None:
    net = on_meta(name, **(BIG if name in MAPS else {}))
    z = torch.empty(2, *net.input_shape, device="meta")
    maps = []
    for stage in net.stages:
        z = stage(z)
        maps.append((z.shape[1], z.shape[2]))
        assert z.shape[2] == z.shape[3]

    assert maps == (MAPS | SMALL_MAPS)[name]


def test_signals_are_halved_by_each_stage_of_har_cnn() -> None:
    net = on_meta("har_cnn")
    z = torch.empty(2, 9, 128, device="meta")
    shapes = []
    for stage in net.stages:
        z = stage(z)
        shapes.append(tuple(z.shape[1:]))
    assert shapes == [(32, 64), (64, 32), (128, 16)]


@pytest.mark.parametrize(
    ("name", "giga_macs"),
    # As published for 224x224 and 1000 classes, two decimals.
    [("resnet18", 1.81), ("resnet50", 4.09), ("mobilenetv2", 0.30), ("densenet121", 2.83)],
)
def test_multiplications_are_those_published(name: str, giga_macs: float) -> None:
    net = on_meta(name, classes=1000, **BIG)
    with FlopCounterMode(display=False) as counter:
        net(torch.empty(1, 3, 224, 224, device="meta"))

    assert counter.get_total_flops() / 2e9 == pytest.approx(giga_macs, abs=0.005)


def test_vit_block_computes_what_torchs_own_encoder_layer_does() -> None:
    width, heads = 384, 6
    block = build("vit_s", input_shape=(3, 32, 32), seed=3).stages[1].eval()
    oracle = nn.TransformerEncoderLayer(
        width, heads, 4 * width, 0.0, F.gelu, 1e-6, batch_first=True, norm_first=True
    ).eval()
    ours = block.state_dict()
    theirs = {
        "norm1": "attention.0",
        "self_attn.in_proj": "attention.1.qkv",
        "self_attn.out_proj": "attention.1.out",
        "norm2": "mlp.0",
        "linear1": "mlp.1",
        "linear2": "mlp.3",
    }
    for their_name, our_name in theirs.items():
        joint = "_" if their_name.endswith("in_proj") else "."
        for kind in ("weight", "bias"):
            oracle.get_parameter(f"{their_name}{joint}{kind}").data = ours[f"{our_name}.{kind}"]
    tokens = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(4))

    with torch.no_grad():
        torch.testing.assert_close(block(tokens), oracle(tokens), rtol=1e-4, atol=1e-5)


def test_vit_counts_197_tokens_at_224() -> None:
    net = on_meta("vit_s")
    assert net.stages[0](torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 197, 384)


@pytest.mark.parametrize("side", [28, 32, 64, 96, 224])
@pytest.mark.parametrize("channels", [1, 3])
def test_resnet18_takes_grey_and_colour_images_from_28_to_224(channels: int, side: int) -> None:
    net = on_meta("resnet18", input_shape=(channels, side, side))
    exits, logits = net.forward_exits(torch.empty(2, channels, side, side, device="meta"))

    assert {tuple(exit_logits.shape) for exit_logits in exits.values()} == {(2, 10)}
    assert logits.shape == (2, 10)


def test_cuts_are_where_the_map_can_be_pooled() -> None:
    assert on_meta("cnn8").cuts == (2, 3, 4, 5)  # depth 1 has a 14x14 map, the grid is 3x3
    assert on_meta("cnn6").cuts == (2, 3)
    assert on_meta("alexnet").cuts == (2, 3, 4, 5)
    assert on_meta("tiny").cuts == (1, 2, 3, 4)
    for name in ("densenet121", "har_cnn", "mobilenetv2", "resnet18", "resnet50", "vgg11"):
        assert on_meta(name).cuts == tuple(range(1, LENGTHS[name]))


@pytest.mark.parametrize(("side", "cells"), [(7, 3), (6, 3), (3, 3), (28, 2), (8, 2), (2, 2)])
def test_grid_pool_is_adaptive_pooling_where_it_is_allowed(side: int, cells: int) -> None:
    x = torch.randn(2, 4, side, side, generator=torch.Generator().manual_seed(5))
    pool = grid_pool(side, cells)

    assert pool is not None
    torch.testing.assert_close(pool(x), F.adaptive_avg_pool2d(x, cells))


@pytest.mark.parametrize(("side", "cells"), [(14, 3), (16, 3), (2, 3), (7, 2), (1, 2), (0, 2)])
def test_grid_pool_is_refused_where_the_map_does_not_divide(side: int, cells: int) -> None:
    assert grid_pool(side, cells) is None


def test_no_exit_head_pools_adaptively_but_to_one_cell() -> None:
    for name in NAMES:
        for part in on_meta(name).modules():
            if isinstance(part, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d):
                assert part.output_size == 1


@pytest.mark.parametrize("name", NAMES)
def test_heads_end_in_the_linear_layer_of_the_logits(name: str) -> None:
    net = on_meta(name, classes=7)
    for head in (net.head, *(net.exit_head(depth) for depth in net.cuts)):
        assert isinstance(head, nn.Sequential)
        last = head[-1]
        assert isinstance(last, nn.Linear)
        assert last.out_features == 7


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("vgg11", (1, 28, 28), "multiple of 32"),
        ("vit_s", (3, 40, 40), "multiple of 16"),
        ("densenet121", (3, 28, 28), "at least 29"),
        ("cnn8", (1, 28, 30), "square"),
        ("cnn8", (28, 28), "input shape like"),
        ("har_cnn", (9, 0), "input shape like"),
        ("tiny", (1, 3, 3), "take larger inputs"),
        ("cnn6", (1, 20, 20), "another input shape"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(
    name: str, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        on_meta(name, input_shape=shape)


def widths(net: Supernet) -> list[int]:
    return [part.out_features for part in net.head.children() if isinstance(part, nn.Linear)]


def test_final_heads_have_the_hidden_layers_of_the_papers() -> None:
    assert widths(on_meta("cnn8")) == [1024, 512, 10]
    assert widths(on_meta("alexnet")) == [1024, 512, 10]
    assert widths(on_meta("cnn6")) == [256, 128, 10]


def variances_after_each_stage(net: Supernet, x: Tensor) -> list[float]:
    spread = [float(x.var())]
    for stage in net.stages:
        x = stage(x)
        spread.append(float(x.var()))
    return spread


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "mobilenetv2", "har_cnn"])
def test_signals_neither_vanish_nor_explode_in_a_new_network(name: str) -> None:
    net = build(name, seed=0)
    x = torch.randn(8, *net.input_shape, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        spread = variances_after_each_stage(net, x)

    assert all(0.01 < after / before < 100 for before, after in pairwise(spread))
