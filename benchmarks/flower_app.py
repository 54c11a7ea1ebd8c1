"""FedAvg in Flower's simulation, for benchmarks/flower.py: it alone imports flwr.

Written like Flower's own PyTorch quickstart, with two things that save Flower work: each worker
keeps its data and its network from one message to the next, and only trained weights travel.
"""

from __future__ import annotations

from functools import lru_cache

import flwr
import numpy as np
import orjson
import ray
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from numpy.typing import NDArray
from torch import nn

from benchmarks.plain_loops import Done, batches, sgd
from edge_sdk.training.data.load import Dataset
from edge_sdk.training.protocol.weights import load_weights, read_weights
from server.training.recipe.partition import partition
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.run.build import build_network, load_data
from server.training.simulation.build import client_names

CPUS = 2
VERSIONS: dict[str, str] = {
    "flwr": flwr.__version__,
    "ray": ray.__version__,
    "torch": torch.__version__,
}


class Share:
    """A worker's view of the recipe: data, the samples of each client, a network to train."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.data: Dataset = load_data(recipe)
        self.network: nn.Module = build_network(recipe, self.data).segment(0, None)
        self.parts = partition(
            recipe.data.partition,
            self.data.y_train,
            recipe.data.clients,
            recipe.seed,
            groups=self.data.group_train,
            **recipe.data.numbers,
        )
        self.names = client_names(len(self.parts))


def run(text: str) -> Done:
    """Run a recipe, given as JSON."""
    recipe = read_recipe(orjson.loads(text))
    done = Done()

    def main(grid: Grid, _context: Context) -> None:
        share = Share(recipe)

        def note(server_round: int, arrays: ArrayRecord) -> None:
            if server_round > 0:  # 0 is before the first
                done.note(arrays.to_torch_state_dict())

        strategy = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=len(share.names), weighted_by_key="samples"
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(read_weights(share.network)),
            num_rounds=recipe.train.rounds,
            train_config=ConfigRecord({"recipe": text}),
            evaluate_fn=note,
        )

    server, client = ServerApp(), ClientApp()
    server.main()(main)
    client.train()(train)
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=recipe.data.clients,
        backend_config={
            "init_args": {"num_cpus": CPUS},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return done


def train(message: Message, context: Context) -> Message:
    """Train one client for a round."""
    torch.set_num_threads(1)
    config = message.content["config"]
    share = _share(config["recipe"])
    number = int(context.node_config["partition-id"])
    load_weights(share.network, message.content["arrays"].to_torch_state_dict())
    rows = share.parts[number]
    steps = batches(share.recipe, int(config["server-round"]), share.names[number], len(rows))
    _learn(share, [rows[batch] for batch in steps])
    reply = {
        "arrays": ArrayRecord(read_weights(share.network)),
        "metrics": MetricRecord({"samples": len(rows)}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


@lru_cache(maxsize=1)
def _share(text: str) -> Share:
    return Share(read_recipe(orjson.loads(text)))


def _learn(share: Share, steps: list[NDArray[np.int64]]) -> None:
    network, data = share.network, share.data
    network.train()
    optimiser = sgd(network.parameters(), share.recipe.train.training)
    for rows in steps:
        x, y = torch.from_numpy(data.x_train[rows]), torch.from_numpy(data.y_train[rows])
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()
