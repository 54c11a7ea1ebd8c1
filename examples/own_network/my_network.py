"""A network of one's own in ten lines: `backbone = "my_network:network"`."""

from torch import nn


def network(classes: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    """Two convolutions and two linear layers; splitedge finds where it can be cut."""
    channels, side = input_shape[0], input_shape[-1] // 4
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * side * side, 64), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(64, classes),
    )
