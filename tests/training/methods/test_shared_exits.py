"""SuperSFL's exit heads: the clients' own, as the paper has it, or the server's too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.methods.supersfl import supersfl
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport

DEPTHS = {"a": 1, "b": 3, "c": 3}


def trained(*, share_exits: bool) -> tuple[Weights, Weights, dict[str, TrainingClient]]:
    """The server's weights before and after a round, and the clients with their own heads."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((3, 8, 1, 8, 8)).astype(np.float32)
    clients = {
        name: TrainingClient(name, x[place], generator.integers(0, 3, 8))
        for place, name in enumerate(DEPTHS)
    }
    method = supersfl(share_exits=share_exits)
    plans = {
        name: Plan(
            backbone="tiny",
            input_shape=(1, 8, 8),
            classes=3,
            mean=(0.0,),
            std=(1.0,),
            depth=depth,
            training=Training(0.05, 4),
            part=method.client,
        )
        for name, depth in DEPTHS.items()
    }
    state = ServerState(build("tiny", classes=3, seed=0), Training(0.05, 8))
    before = state.read()
    RoundLoop(method, plans, state, LocalTransport(clients)).run_round(1, 0)
    return before, state.read(), clients


def head(weights: Weights, start: str) -> torch.Tensor:
    return torch.cat([t.flatten() for name, t in weights.items() if name.startswith(start)])


@pytest.mark.parametrize("share_exits", [False, True])
def test_server_has_the_heads_of_trained_depths_only_where_they_are_shared(
    share_exits: bool,
) -> None:
    before, after, _ = trained(share_exits=share_exits)
    exits = [name for name in before if name.startswith("exit")]
    changed = {name[:5] for name in exits if not torch.equal(before[name], after[name])}
    assert changed == ({"exit1", "exit3"} if share_exits else set())


def test_shared_head_is_the_mean_of_those_of_its_depth_by_the_weights_of_eq_6() -> None:
    _, after, clients = trained(share_exits=True)
    # alone at its depth, and the server has no vote on what it does not train
    heads = {name: head(client.personal, "exit") for name, client in clients.items()}
    torch.testing.assert_close(head(after, "exit1."), heads["a"])
    # of one depth: by the inverse of their losses alone, so on the line between them
    share = ((head(after, "exit3.") - heads["c"]) / (heads["b"] - heads["c"])).nanmedian()
    assert 0 < share < 1
    torch.testing.assert_close(head(after, "exit3."), torch.lerp(heads["c"], heads["b"], share))
