"""A small network on the digits of scikit-learn, trained in seconds and exported for a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk import AgentSettings, EdgeAgent

Array = NDArray[Any]

SAMPLES: Final = 120


def export_digits(models: Path) -> Array:
    """Train the small network on the digits and export it; gives raw inputs it did not see."""
    import torch  # noqa: PLC0415 - seconds

    from edge_sdk.nets import build  # noqa: PLC0415
    from edge_sdk.training.data.load import load_dataset  # noqa: PLC0415
    from exporters.model import export_model  # noqa: PLC0415

    torch.set_num_threads(1)
    data = load_dataset("digits")
    shape = data.x_train.shape[1:]
    net = build("tiny", classes=10, input_shape=shape, mean=data.mean, std=data.std, seed=0)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    x, y = torch.as_tensor(data.x_train), torch.as_tensor(data.y_train)
    net.train()
    cross_entropy = torch.nn.functional.cross_entropy
    for epoch in range(6):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in torch.split(order, 32):
            exits, final = net.forward_exits(x[rows])
            losses = [cross_entropy(logits, y[rows]) for logits in (*exits.values(), final)]
            optimiser.zero_grad()
            total = torch.stack(losses).mean()
            total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
    net.eval()
    names = [str(number) for number in range(10)]
    export_model(
        net,
        data.x_test[SAMPLES:],
        data.y_test[SAMPLES:],
        models,
        name="digits",
        version=1,
        class_names=names,
        depths=[2],
        int8="never",
    )
    inputs: Array = np.ascontiguousarray(data.x_test[:SAMPLES], np.float32)
    return inputs


def threshold_of_a_quarter(models: Path, inputs: Array) -> float:
    """A threshold above which a quarter of the inputs lie, midway between two of them."""
    settings = AgentSettings(offload=False)
    with EdgeAgent.from_bundle(models / "digits" / "1" / "bundles" / "d2", settings) as agent:
        found = sorted(agent.predict(x).uncertainty for x in inputs)
    place = len(found) * 3 // 4
    return (found[place - 1] + found[place]) / 2
