"""Scores of the trained network on a client's own held-out samples, which stay on the client.

A client that adapts to its data does so first. The weights that it answers with from then on are
kept in the form that a bundle's graphs take (edge_sdk.bundles.namespaces.answers).
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from edge_sdk.bundles.namespaces import BACK, answers
from edge_sdk.errors import FrameError
from edge_sdk.nets.folding import fold_norms
from edge_sdk.training.client.auxiliary import build_auxiliary, namespace_of
from edge_sdk.training.client.fine_tuning import fine_tune, refitted_back
from edge_sdk.training.client.personal_head import personal_classifier
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.client.whole.last_layer import load_whole
from edge_sdk.training.client.whole.own_network import load_own
from edge_sdk.training.protocol.messages import Evaluate, Scores, Weights
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import (
    load_weights,
    read_weights,
    split_exit_head,
    without_auxiliary,
)

BATCH: Final = 128


def evaluate_locally(client: ClientState, message: Evaluate) -> Scores:
    """Count the right answers of the whole network, and of the model that answers on the device.

    The client's personal weights are part of both; those that answer are kept.

    Returns: scores of 0 samples if the client has none held out.
    Raises: FrameError if the weights are of another network.
    """
    held_out = client.held_out
    empty = held_out is None or not len(held_out[1])
    if held_out is not None and not empty and held_out[0].shape[1:] != message.plan.input_shape:
        raise FrameError(
            f"client {client.name}: the plan is for inputs {message.plan.input_shape},"
            f" the held-out data here are {held_out[0].shape[1:]}"
        )
    keeps = _own(client, message.plan)
    if empty and not keeps:  # nothing to score and nothing to keep: no network is built
        return Scores(message.round, 0, 0, None)
    whole, alone = _models(client, message)
    if alone is not None and keeps and not message.plan.part.shared_auxiliary:
        client.keep(_answering(message.plan, alone), message.round)
    if held_out is None or empty:
        return Scores(message.round, 0, 0, None)
    x, y = held_out
    for model in (whole, alone):
        if model is not None:
            model.to(client.device).eval()
    right = right_alone = 0
    with torch.inference_mode():
        for at in range(0, len(y), BATCH):
            rows = torch.from_numpy(np.ascontiguousarray(x[at : at + BATCH])).to(client.device)
            labels = torch.from_numpy(np.asarray(y[at : at + BATCH], np.int64)).to(client.device)
            right += _right(whole, rows, labels)
            if alone is not None:
                right_alone += _right(alone, rows, labels)
    return Scores(message.round, len(y), right, None if alone is None else right_alone)


def _models(client: ClientState, message: Evaluate) -> tuple[nn.Module, nn.Module | None]:
    """The network as this client uses it, and the model that answers on the device, if any."""
    plan, part, personal = message.plan, message.plan.part, client.personal
    net = deepcopy(network_of(plan))
    sent, head = split_exit_head(client.start_weights(plan, message.weights), plan.depth)
    network = net.segment(0, None)
    if part.whole:
        load_whole(network, plan, sent, personal)
        load_own(network, personal)
        return net, None
    load_weights(network, without_auxiliary(sent, plan.depth))
    prefix = net.prefix(plan.depth)
    suffix: nn.Module = net.suffix(plan.depth)
    if part.own_back:
        neck = net.suffix(plan.depth).neck
        suffix = nn.Sequential(neck, _own_back(client, message, nn.Sequential(prefix, neck)))
    whole = nn.Sequential(prefix, suffix)
    if part.distil is not None:
        auxiliary = build_auxiliary(plan)
        held = sent if part.distil.averaged else personal
        return whole, auxiliary if auxiliary.load(held, namespace_of(plan)) else None
    if not part.exit_head or not head:
        return whole, None
    exit_head = net.exit_head(plan.depth)
    load_weights(exit_head, head)
    if client.fine_tuning.steps:
        net.to(client.device)
        fine_tune(client, plan, (prefix, exit_head), client.fine_tuning, message.round)
    return whole, nn.Sequential(OrderedDict(prefix=prefix, head=exit_head))


def _own_back(client: ClientState, message: Evaluate, base: nn.Module) -> nn.Linear:
    """The client's own last layer, refitted behind `base` and kept where it is asked to.

    The layer of the last round stays too, because the next one starts from it.
    """
    plan, epochs = message.plan, client.fine_tuning.refit_epochs
    if plan.part.back is None or not epochs:
        return personal_classifier(plan, client.personal)
    base.to(client.device)
    back = refitted_back(client, plan, base, epochs)
    client.keep(answers(plan.depth).prefixed(BACK.prefixed(read_weights(back))), message.round)
    return back


def _own(client: ClientState, plan: Plan) -> bool:
    """Whether the client answers with more of its own than the weights of its last round."""
    part, how = plan.part, client.fine_tuning
    refits = part.back is not None and how.refit_epochs
    return bool(part.personal_share or how.steps or part.own_auxiliary or refits)


def _answering(plan: Plan, alone: nn.Module) -> Weights:
    """The weights of the model that answers on the device, by the names of a bundle's graphs."""
    parts = OrderedDict(alone.named_children())
    for name in parts.keys() - {"head"}:  # stages, whose BatchNorm a graph has folded
        parts[name] = fold_norms(parts[name])
    weights = {name: p.detach() for name, p in nn.Sequential(parts).named_parameters()}
    return answers(plan.depth).prefixed(weights)


def _right(model: nn.Module, x: Tensor, labels: Tensor) -> int:
    return int((model(x).argmax(1) == labels).sum())
