"""What HARMONY's messages give away of labels, by themselves and by the gradients of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import urllib3
from torch import Tensor, nn

from benchmarks.attacks.labels import (
    by_direction,
    by_likelihood,
    by_sign,
    candidate_gradients,
    guessing_rate,
)
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import (
    Features,
    OutputGradient,
    Outputs,
    Ready,
    Reply,
    Request,
    Step,
    Update,
    from_bytes,
    to_bytes,
)
from edge_sdk.training.protocol.plan import network_of
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.methods.harmony import harmony
from server.training.methods.method import Method
from server.training.methods.splitfed import splitfed_v1
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundSettings
from server.training.rounds.transport import LocalTransport
from tests.training.methods.harmony.trainer import (
    BATCH,
    CLASSES,
    NAMES,
    RATE,
    SEED,
    Trainer,
    client,
    plan_for,
)


class Wiretap(LocalTransport):
    """Hears every message, as the bytes in which it would travel."""

    def __init__(self, clients: Mapping[str, TrainingClient]) -> None:
        super().__init__(clients)
        self.heard: list[tuple[str, Request, Reply]] = []

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        replies = super().exchange(requests, deadline_s)
        for name, reply in replies.items():
            request = requests[name]
            back = from_bytes(to_bytes(reply))
            assert isinstance(back, Ready | Features | OutputGradient | Update)
            self.heard.append((name, request, back))
        return replies


def values_in(reply: Reply) -> Iterator[Tensor]:
    """Everything in a reply, as rows of numbers; a bare number is a row of one."""
    for name in reply.__dataclass_fields__:
        value = getattr(reply, name)
        found = list(value.values()) if isinstance(value, dict) else [value]
        for part in found:
            if isinstance(part, Tensor):
                yield part.double()
            elif isinstance(part, tuple | list) and part:
                yield torch.tensor(part, dtype=torch.float64)


def says_labels(reply: Reply, labels: Tensor, counts: Tensor) -> bool:
    """Whether labels of the batch, their one-hots or the client's histogram are in it, scaled or
    not, in any arrangement of the tensor.
    """
    onehot = nn.functional.one_hot(labels, CLASSES)
    of_batch = onehot.sum(0)
    secrets = [labels, onehot, onehot.T, counts, of_batch]
    for rows in values_in(reply):
        for secret in secrets:
            flat, wanted = rows.flatten(), secret.double().flatten()
            if len(flat) != len(wanted):
                continue
            nearly = flat / flat.abs().max().clamp(min=1e-300)
            if torch.allclose(nearly, wanted / wanted.abs().max().clamp(min=1e-300), atol=1e-4):
                return True
    return False


def overheard(method: Method) -> tuple[list[bool], set[str]]:
    """Whether it holds labels, for every reply of a round, and the kinds of replies."""
    people = {name: client(name, 23) for name in NAMES}
    # four batches; neither all of one label, nor as many samples as classes
    trainer = Trainer(method, {"ada": 1, "bob": 2, "cyd": 3}, people, transport=Wiretap)
    trainer.run()
    found, kinds = [], set()
    for name, request, reply in trainer.wire.heard:
        owner = people[name]
        step = request.step if isinstance(request, Step | Outputs) else 0
        generator = np.random.default_rng([SEED, 1, crc32(name.encode())])
        rows = generator.permutation(owner.samples)[step * BATCH : (step + 1) * BATCH]
        labels = torch.from_numpy(owner.y[rows])
        counts = torch.from_numpy(np.bincount(owner.y, minlength=CLASSES))
        found.append(says_labels(reply, labels, counts))
        kinds.add(type(reply).__name__)
    return found, kinds


@pytest.mark.parametrize("head", ["server", "client"])
def test_no_label_histogram_or_onehot_is_sent(head: Any) -> None:
    found, kinds = overheard(harmony(head=head))
    assert kinds == {"Ready", "Features", "OutputGradient", "Update"}
    assert not any(found)
    # the same ears hear it where labels are sent: counts at the start, labels in every batch
    heard, _ = overheard(splitfed_v1())
    assert sum(heard) == 3 + 3 * 5


def test_no_reply_carries_a_field_for_labels() -> None:
    people = {"ada": client("ada", 10)}
    trainer = Trainer(harmony(), {"ada": 2}, people, transport=Wiretap)
    trainer.run()
    for _, _, reply in trainer.wire.heard:
        if isinstance(reply, Ready):
            assert reply.label_counts == ()
        if isinstance(reply, Features):
            assert reply.labels is None
            assert reply.loss is None  # of a batch of one the loss is the label
            assert reply.same is not None
            assert set(reply.same.tolist()) <= {0, 1}
        if isinstance(reply, OutputGradient):
            assert reply.loss == 0


def test_nothing_of_labels_goes_over_http(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every body that leaves two devices, hello included, in a round over real HTTP."""
    heard: list[tuple[str, bytes]] = []
    request = urllib3.PoolManager.request

    def tapped(pool: Any, method: str, url: str, **more: Any) -> Any:
        heard.append((url.split("?", maxsplit=1)[0].rsplit("/", 1)[1], more.get("body") or b""))
        return request(pool, method, url, **more)

    monkeypatch.setattr(urllib3.PoolManager, "request", tapped)
    # as many samples; of ada's labels the largest is 3, of bob's 1
    people = {"ada": client("ada", 23), "bob": client("bob", 23, classes=2)}
    assert [int(person.y.max()) for person in people.values()] == [3, 1]
    here, method = make_trainer(), harmony()
    plans = {name: plan_for(method, 2) for name in people}
    state = ServerState(deepcopy(network_of(plans["ada"])), Training(RATE, 8), method.trunk)
    here.join(people)
    result = RoundLoop(method, plans, state, here.transport, RoundSettings(quorum=0.0)).run_round(
        1, SEED
    )
    assert result.participants == ("ada", "bob")
    hellos = [body for what, body in heard if what == "hello"]
    assert len(hellos) == 2
    assert hellos[0] == hellos[1], "a hello depends on labels"
    replies = [from_bytes(body) for what, body in heard if what == "reply"]
    assert {type(reply) for reply in replies} == {Ready, Features, OutputGradient, Update}
    for reply in replies:
        assert isinstance(reply, Ready | Features | OutputGradient | Update)
        for person in people.values():
            counts = torch.from_numpy(np.bincount(person.y, minlength=CLASSES))
            assert not says_labels(reply, torch.from_numpy(person.y), counts)


@dataclass
class Leak:
    """Shares of labels that an attack read, and that guessing reads."""

    read: float
    guessed: float


def leak(method: Method, rounds: int = 1) -> dict[str, Leak]:
    """Labels that the server can read in the gradients of a training, by attack.

    Clients of two classes each. The server is given what it could come to know besides the
    gradients: which classes a client has, and for directions ten labelled gradients of each.
    """
    people = {name: client(name, 100, 2) for name in NAMES}
    for shift, owner in enumerate(people.values()):
        owner.y = owner.y + shift
    trainer = Trainer(method, dict.fromkeys(NAMES, 2), people, transport=Wiretap)
    trainer.run(rounds)
    hits: dict[str, list[Tensor]] = {}
    guesses = []
    for name, owner in people.items():
        mine = [(q, r) for who, q, r in trainer.wire.heard if who == name]
        asked = [q for q, r in mine if isinstance(r, OutputGradient)]
        outputs = torch.cat([q.outputs for q in asked if isinstance(q, Outputs)])
        gradients = torch.cat([r.gradient for _, r in mine if isinstance(r, OutputGradient)])
        labels = []
        for number in range(1, rounds + 1):
            generator = np.random.default_rng([SEED, number, crc32(name.encode())])
            labels.append(torch.from_numpy(owner.y[generator.permutation(owner.samples)]))
        truth = torch.cat(labels)[: len(gradients)]  # much noise, and a client diverges
        guesses.append(guessing_rate(truth))
        there = torch.tensor(sorted(set(truth.tolist())))
        known = [gradients[:50][truth[:50] == label][:10] for label in range(CLASSES)]
        found = {"direction": by_direction(gradients, known)}
        if gradients.shape[1] == CLASSES:
            found["sign"] = by_sign(gradients)
            candidates = candidate_gradients(outputs, BATCH)[:, there]
            found["likelihood"] = there[by_likelihood(gradients, candidates)]
        for attack, guess in found.items():
            hits.setdefault(attack, []).append((guess == truth).double())
    guessed = float(np.mean(guesses))
    return {attack: Leak(float(torch.cat(each).mean()), guessed) for attack, each in hits.items()}


def test_labels_are_derivable_from_logit_gradients() -> None:
    found = leak(harmony())
    assert found["sign"].read == 1.0
    assert found["likelihood"].read == 1.0
    assert harmony().labels == "derivable"


def test_head_on_the_client_does_not_make_labels_private() -> None:
    """Two classes pull embeddings in opposite directions, whatever the head is."""
    found = leak(harmony(head="client"))
    assert found.keys() == {"direction"}
    assert found["direction"].read > 0.95
    assert harmony(head="client").labels == "derivable"


def test_noise_lowers_what_is_read_and_the_word_stays() -> None:
    reads = [leak(harmony(noise=noise))["likelihood"] for noise in (0.0, 1.0, 1000.0)]
    rates = [found.read for found in reads]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    assert rates[1] > 0.8  # noise as large as the gradient still says most labels
    # 300 labels: three standard deviations of a fair coin are 9 %
    assert rates[2] < reads[2].guessed + 0.09
    assert harmony(noise=1000.0).labels == "derivable"
