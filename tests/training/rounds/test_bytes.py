"""Messages as bytes, both ways: no bit of the training differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from edge_sdk.manifest import Codec
from server.training.methods.method import Method
from tests.training.worlds import (
    METHODS,
    BytesTransport,
    World,
    assert_same,
    differences,
)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_bytes_in_between_change_no_bit(method: Callable[[], Method], codec: Codec) -> None:
    local = World(method(), codec=codec, momentum=0.9)
    remote = World(method(), codec=codec, momentum=0.9, transport=BytesTransport)
    ours, theirs = local.run(3), remote.run(3)

    assert_same(local.state.read(), remote.state.read())
    for name in local.clients:
        assert_same(local.clients[name].personal, remote.clients[name].personal)
    assert [replace(r, seconds=0) for r in ours] == [replace(r, seconds=0) for r in theirs]
    assert differences(local.state.read(), local.before)
