"""Telling the port that the peer of a request has logged in.

An answer proves a peer too, but the answer to a long poll may take half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Final

# key of an ASGI request's state; behind it is a function that any thread may call
PROVE: Final = "splitedge.prove"


def prove_peer(scope: MutableMapping[str, Any]) -> None:
    """Count the connection of this request as a stranger's no more; any thread may call it."""
    prove: Callable[[], object] | None = scope.get("state", {}).get(PROVE)
    if prove is not None:  # an application under test has no port
        prove()
