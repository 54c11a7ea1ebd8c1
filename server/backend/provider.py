"""The execution provider by which a server runs its segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.providers.names import AUTO, CPU

# Providers that `auto` takes where onnxruntime has them. The others are for small devices, or build
# their engines anew for each size of a batch.
AUTOMATIC: Final = ("cuda",)


def provider_of(wanted: str, there: Sequence[str]) -> str:
    """The provider to begin with.

    Args:
        wanted: a name, or `auto`.
        there: the providers that onnxruntime was built with.
    Raises: ConfigurationError for one that is not there.
    """
    if wanted == AUTO:
        return next((one for one in AUTOMATIC if one in there), CPU)
    if wanted not in there:
        raise ConfigurationError(
            f"--provider {wanted}: this onnxruntime was built for {', '.join(there)}; for a GPU of"
            " NVIDIA, `pip install onnxruntime-gpu` in place of onnxruntime"
        )
    return wanted
