"""Batches of two clients' samples: their rows, the copies that are stepped, the gradients."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from edge_sdk.nets import build
from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.protocol.messages import Features
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights
from edge_sdk.training.streams import Stream
from server.training.core.server_state import ServerState
from server.training.methods.formulas.contrastive import Alignment, alignment_loss
from server.training.methods.smashed_exchange import Draws, exchanged, own_batch, step_hosts
from server.training.methods.steps import ClientBatch

RATE = 0.1
LOSSES = partial(evidential_losses, kl_weight=0.3)


def batch_of(labels: list[int], seed: int, shape: tuple[int, ...] = (16, 4, 4)) -> ClientBatch:
    z = torch.randn(len(labels), *shape, generator=torch.Generator().manual_seed(seed))
    return ClientBatch(2, Features(1, 0, z, torch.tensor(labels), None))


def pair() -> dict[str, ClientBatch]:
    return {"i": batch_of([0, 0, 0, 1], 1), "j": batch_of([2, 1, 2, 2, 1], 2)}


def state(backbone: str = "tiny", clip: float | None = None) -> ServerState:
    shape = {"tiny": (1, 8, 8), "resnet18": (1, 16, 16)}[backbone]
    net = build(backbone, classes=3, input_shape=shape, seed=0)
    return ServerState(net, Training(RATE, 8), clip=clip)


def moves(*counts: list[int]) -> dict[tuple[str, str], torch.Tensor]:
    return {("i", "j"): torch.tensor(counts[0]), ("j", "i"): torch.tensor(counts[1])}


def draws(seed: int, number: int, step: int) -> Draws:
    return lambda client: Stream.EXCHANGE.generator(seed, round=number, step=step, client=client)


def test_every_sample_lies_in_one_batch_and_as_many_moved_as_asked() -> None:
    both = pair()
    batches = exchanged(both, moves([2, 0, 0], [0, 1, 3]), draws(7, 1, 0))
    assert batches is not None
    for origin, one in both.items():
        rows = torch.cat([batches[host][origin] for host in "ij"])
        assert sorted(rows.tolist()) == list(range(len(one.labels)))
    assert both["i"].labels[batches["j"]["i"]].tolist() == [0, 0]
    assert sorted(both["j"].labels[batches["i"]["j"]].tolist()) == [1, 2, 2, 2]


def test_the_draw_is_that_of_its_key() -> None:
    both = {"i": batch_of([0] * 30, 1), "j": batch_of([1] * 30, 2)}
    asked = moves([10, 0, 0], [0, 10, 0])

    def drawn(*key: int) -> list[int]:
        batches = exchanged(both, asked, draws(*key))
        assert batches is not None
        rows: list[int] = batches["j"]["i"].tolist()
        return rows

    assert drawn(7, 1, 0) == drawn(7, 1, 0) == sorted(drawn(7, 1, 0))
    assert drawn(7, 1, 0) != drawn(7, 1, 1)
    other_way = exchanged(both, asked, draws(7, 1, 0))
    assert other_way is not None
    assert other_way["i"]["j"].tolist() != drawn(7, 1, 0)  # the client's name is in its key too


def test_nothing_to_move_or_too_little_left_is_no_exchange() -> None:
    both = pair()
    assert exchanged(both, moves([0, 0, 0], [0, 0, 0]), draws(1, 1, 0)) is None
    # one sample left in i's
    assert exchanged(both, moves([3, 1, 0], [0, 1, 0]), draws(1, 1, 0)) is None
    assert exchanged(both, moves([3, 1, 0], [0, 2, 0]), draws(1, 1, 0)) is not None


def test_gradients_and_outputs_are_those_of_the_copy_a_sample_lay_in() -> None:
    server, both = state(), pair()
    # copies that differ
    for client in both:
        assert step_hosts(server, both, own_batch(client, both[client]), LOSSES) is not None
    before = {c: deepcopy(server.copies[c].module) for c in both}
    batches = {
        "i": {"i": torch.tensor([0, 3]), "j": torch.tensor([1, 4, 2])},
        "j": {"j": torch.tensor([0, 3]), "i": torch.tensor([1, 2])},
    }
    results = step_hosts(server, both, batches, LOSSES)
    assert results is not None

    for host, pieces in batches.items():
        z = torch.cat([both[c].features.features[rows] for c, rows in pieces.items()])
        y = torch.cat([both[c].labels[rows] for c, rows in pieces.items()])
        z.requires_grad_()
        logits = before[host](z)
        losses = LOSSES(logits, y)
        losses.mean().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert z.grad is not None
        sizes = [len(rows) for rows in pieces.values()]
        for (origin, rows), gradient, outputs, some in zip(
            pieces.items(),
            z.grad.split_with_sizes(sizes),
            logits.detach().split_with_sizes(sizes),
            losses.detach().split_with_sizes(sizes),
            strict=True,
        ):
            result = results[origin]
            torch.testing.assert_close(result.gradient[rows], gradient, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(result.outputs[rows], outputs, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(result.losses[rows], some, rtol=1e-6, atol=1e-7)
        for after, start in zip(
            server.copies[host].module.parameters(), before[host].parameters(), strict=True
        ):
            assert start.grad is not None
            torch.testing.assert_close(
                after.detach(), start.detach() - RATE * start.grad, rtol=1e-6, atol=1e-8
            )
    assert results["i"].loss == float(results["i"].losses.mean())
    assert results["i"].gradient.is_contiguous()
    assert not results["i"].outputs.requires_grad


def test_steps_are_clipped_as_the_server_is_told() -> None:
    server, one = state(clip=1e-3), {"i": pair()["i"]}
    before = read_weights(server.net.suffix(2))
    step_hosts(server, one, own_batch("i", one["i"]), LOSSES)
    after = read_weights(server.copies["i"].module)
    moved = sum(float((after[name] - before[name]).square().sum()) for name in before) ** 0.5
    assert abs(moved - RATE * 1e-3) < 1e-7


def test_a_pair_that_cannot_be_learnt_from_changes_nothing() -> None:
    server = state("resnet18")
    shape = server.shape_at(2)
    both = {"i": batch_of([0, 0, 1, 1], 1, shape), "j": batch_of([2, 2, 1, 1], 2, shape)}
    both["i"].features.features[0] = 3e38
    batches = {
        "i": {"i": torch.tensor([1, 2, 3]), "j": torch.tensor([0])},
        "j": {"j": torch.tensor([1, 2, 3]), "i": torch.tensor([0])},
    }
    assert step_hosts(server, both, batches, LOSSES) is None
    fresh = server.net.suffix(2).state_dict()
    for client in both:
        for name, tensor in server.copies[client].module.state_dict().items():
            assert torch.equal(tensor, fresh[name]), name
    assert step_hosts(server, both, own_batch("j", both["j"]), LOSSES) is not None


def test_zero_gradients_are_a_step_like_any_other() -> None:
    server, one = state(), {"i": batch_of([0, 1, 2], 1)}
    with torch.no_grad():
        for parameter in server.net.head.parameters():
            parameter.zero_()  # no logit depends on z then
    results = step_hosts(server, one, own_batch("i", one["i"]), LOSSES)
    assert results is not None
    assert float(results["i"].gradient.abs().sum()) == 0


def paired(one: ClientBatch, seed: int, weight: float) -> ClientBatch:
    """With a second view of which every other sample is of the same class."""
    view = torch.randn(one.features.features.shape, generator=torch.Generator().manual_seed(seed))
    same = (torch.arange(len(view)) % 2).to(torch.uint8)
    features = replace(one.features, view=view, entry=one.depth, same=same)
    return ClientBatch(one.depth, features, Alignment(weight, 20.0, normalise=False))


def test_second_views_change_sides_with_their_samples() -> None:
    """Each copy is stepped by its batch's loss and by CSA over that batch's pairs, and what goes
    back to the clients is the loss's alone.
    """
    batches = {
        "i": {"i": torch.tensor([0, 3]), "j": torch.tensor([1, 4, 2])},
        "j": {"j": torch.tensor([0, 3]), "i": torch.tensor([1, 2])},
    }
    alone = step_hosts(state(), pair(), batches, LOSSES)
    server = state()
    both = {client: paired(one, 5 + len(one.labels), 0.4) for client, one in pair().items()}
    results = step_hosts(server, both, batches, LOSSES)
    assert alone is not None
    assert results is not None
    for client, result in results.items():
        assert torch.equal(result.gradient, alone[client].gradient)
        assert torch.equal(result.outputs, alone[client].outputs)
    for host, pieces in batches.items():
        suffix = build("tiny", classes=3, seed=0).suffix(2)
        neck = nn.Sequential(*list(suffix.children())[:-1], *list(suffix[-1].children())[:-1])
        z, views, labels, same = (
            torch.cat(
                [getattr(both[origin].features, name)[rows] for origin, rows in pieces.items()]
            )
            for name in ("features", "view", "labels", "same")
        )
        loss = LOSSES(suffix(z), labels).mean()
        total = loss + 0.4 * alignment_loss(neck(views), neck(z), same == 1, 20.0)
        for parameter, gradient, now in zip(
            suffix.parameters(),
            torch.autograd.grad(total, list(suffix.parameters())),
            server.copies[host].module.parameters(),
            strict=True,
        ):
            stepped = parameter - RATE * gradient
            torch.testing.assert_close(now, stepped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 1e38])
def test_alignment_that_is_nothing_or_overflows(weight: float) -> None:
    """None is none to the bit; one that is not finite steps nothing, as a loss that is not."""
    server, plain = state(), state()
    one = paired(pair()["i"], 9, weight)
    one = replace(one, align=Alignment(weight, 1e30 if weight else 1.0, normalise=False))
    got = step_hosts(server, {"i": one}, own_batch("i", one), LOSSES)
    assert (got is None) == bool(weight)
    if got is not None:
        step_hosts(plain, {"i": pair()["i"]}, own_batch("i", pair()["i"]), LOSSES)
    expected = plain.copies["i"].module if plain.copies else plain.net.suffix(2)
    now = read_weights(server.copies["i"].module)
    assert all(torch.equal(now[name], t) for name, t in read_weights(expected).items())
