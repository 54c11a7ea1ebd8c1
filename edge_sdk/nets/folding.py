"""BatchNorm folded into the convolutions in front of it, as a graph in inference has it.

A device that replaces the weights of a graph needs them in the graph's own form. Exporter and
device fold by this one function, so that their names and values fit.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from torch import nn
from torch.fx import GraphModule, Proxy, Tracer
from torch.fx.experimental.optimization import fuse

NORMALISE = "normalise"
# A trace replaces methods of nn.Module for the whole process, and puts them back. Two at a time
# would put back each other's.
_ONE_TRACE: Final = threading.Lock()


def fold_norms(view: nn.Module) -> nn.Sequential:
    """A copy of a view in eval mode, each part with its BatchNorms folded where that is possible.

    Safe beside other threads that fold or run modules.

    Args:
        view: parts in a row, as `Supernet.prefix` gives them; not changed.
    Returns: the same function, with the parameters' names kept. A part whose forward pass cannot be
        traced stays as it is.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, part in view.named_children():
        parts[name] = part if name == NORMALISE else _folded(part)
    return nn.Sequential(parts).eval()


class _ThreadTracer(Tracer):
    """Traces what its own thread calls; modules of other threads run as they always do."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record a call of this thread; let one of another thread through."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        """Record a look-up of this thread; let one of another thread through."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _folded(part: nn.Module) -> nn.Module:
    own = copy.deepcopy(part).eval()  # another thread may run the part itself
    try:
        with _ONE_TRACE:
            graph = _ThreadTracer().trace(own)
        folded: nn.Module = fuse(GraphModule(own, graph), inplace=True, no_trace=True)
    except Exception:  # noqa: BLE001 - a user's forward pass gets proxies: `len(x)` raises anything
        return own
    return folded
