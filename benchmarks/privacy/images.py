"""Inversion: what of an image can be rebuilt from its smashed data, by depth, codec and guard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.attacks.inversion import Inverter, Leak
from benchmarks.compare import train
from benchmarks.privacy.worlds import Trial, World
from edge_sdk.manifest import Codec
from edge_sdk.nets import build
from edge_sdk.training.protocol.noise import clip_samples
from edge_sdk.wire.codecs import decode, encode
from server.training.run.run import Simulation

CODECS: Final[tuple[Codec, ...]] = ("fp32", "fp16", "int8")
CLIP: Final = 10.0
_SCALA: Final[Mapping[str, Any]] = {"train": {"iterations": 20, "batch": 160, "epochs": 1}}
# what a recipe can set against inversion; the accuracy beside it says what it costs
GUARDS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "bottleneck of 8 channels (SCALA)": ("scala", {"method_numbers": {"bottleneck": 8}, **_SCALA}),
    "bottleneck and inversion guard (SCALA-PE)": (
        "scala",
        {"method_numbers": {"bottleneck": 8, "inversion": 0.3}, **_SCALA},
    ),
    **{
        f"noise of {sigma} x clip on features": (
            "splitfed-v1",
            {"privacy": {"feature_clip": CLIP, "feature_sigma": sigma}},
        )
        for sigma in (0.01, 0.05)
    },
}
_SHOWN: Final = 8


class Sent(nn.Module):
    """Smashed data as they leave the device: in a codec, with noise where the recipe has it.

    Args:
        sigma: standard deviation of the noise, as a multiple of CLIP; 0 sends features as they are.
    """

    def __init__(self, prefix: nn.Module, codec: Codec, sigma: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.prefix = prefix
        self.codec = codec
        self._sigma = sigma
        self._random = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        """Raw inputs (B, ...) to features (B, ...) as the server decodes them."""
        z: Tensor = self.prefix(x)
        if self._sigma:
            z = clip_samples(z, CLIP)
            z = z + self._sigma * CLIP * torch.randn(z.shape, generator=self._random)
        rows = [decode(*encode(row, self.codec)) for row in z.detach().numpy()]
        return torch.from_numpy(np.stack(rows))


@dataclass
class Pictures:
    """Rows of images for the report's picture, each (n, C, H, W) in [0, 1], by name."""

    rows: dict[str, Tensor] = field(default_factory=dict)


def rebuilt_images(world: World, pictures: Pictures) -> Iterator[Trial]:
    """Attack every depth in every codec, and one depth under every guard."""
    for depth in build(world.scale.backbone, seed=0).cuts:
        simulation, rows = train(world.recipe("splitfed-v1", {"train": {"depth": depth}}))
        accuracy = rows[-1]["accuracy"]
        prefix = simulation.state.net.prefix(depth)
        for codec in CODECS:
            name = f"depth {depth}, {codec}"
            leak = _attacked(
                world, pictures, simulation, name, Sent(prefix, codec, seed=world.seed)
            )
            yield Trial("images", name, world.seed, {"accuracy": accuracy} | asdict(leak))
    for name, (method, changes) in GUARDS.items():
        recipe = world.recipe(method, changes)
        simulation, rows = train(recipe)
        sigma = recipe.privacy.limits.feature_sigma
        prefix = simulation.state.net.prefix(world.scale.depth)
        named = f"depth {world.scale.depth}, int8, {name}"
        leak = _attacked(
            world, pictures, simulation, named, Sent(prefix, "int8", sigma, world.seed)
        )
        yield Trial("images", named, world.seed, {"accuracy": rows[-1]["accuracy"]} | asdict(leak))


def _attacked(
    world: World, pictures: Pictures, simulation: Simulation, name: str, sent: Sent
) -> Leak:
    held = np.concatenate([client.x for client in simulation.clients.values()])
    order = np.random.default_rng(world.seed).permutation(len(held))
    private = held[order[: world.scale.attacked]]
    known = simulation.x_test[: len(simulation.x_test) // 2]
    inverter = Inverter(sent, known, replace(world.scale.inverter, seed=world.seed))
    if sent.codec == "int8" and world.seed == 0:
        drawn, images = inverter.rebuild(private[:_SHOWN])
        pictures.rows.setdefault("inputs", images)
        pictures.rows[name] = drawn
    return inverter.measure(private)
