"""BatchNorm folded into the convolutions in front of it, as a graph in inference has it.

A device that replaces the weights of a graph needs them in the graph's own form. Exporter and
device fold by this one function, so that their names and values fit.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torch.fx.experimental.optimization import fuse

NORMALISE = "normalise"


def fold_norms(view: nn.Module) -> nn.Sequential:
    """A copy of a view in eval mode, each part with its BatchNorms folded where that is possible.

    Args:
        view: parts in a row, as `Supernet.prefix` gives them; not changed.
    Returns: the same function, with the parameters' names kept. A part whose forward pass cannot be
        traced stays as it is.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, part in view.named_children():
        parts[name] = part if name == NORMALISE else _folded(part)
    return nn.Sequential(parts).eval()


def _folded(part: nn.Module) -> nn.Module:
    training = part.training
    part.eval()
    try:
        folded: nn.Module = fuse(part)
    except Exception:  # noqa: BLE001 - a user's forward pass gets proxies: `len(x)` raises anything
        return part
    finally:
        part.train(training)
    return folded
