"""What a client does in one round: SplitFed's half, with an exit head and gradient fusion if asked.

ready      counts, before the first batch
step       close the batch before with the server's feedback, open the next: features go up
answer     label-private methods: from the server's outputs to their gradient
end        close the last batch, hand over the weights
alone      the same without the server
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.nets.copying import copied
from edge_sdk.training.client.fusion import clip_l2, fuse, own_weight
from edge_sdk.training.client.second_view import SecondBatches, SecondView
from edge_sdk.training.formulas.evidence import evidential_losses, kl_weight_at
from edge_sdk.training.formulas.sgd import Sgd
from edge_sdk.training.protocol.feature_codec import encode_batch
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    OutputGradient,
    Outputs,
    Ready,
    StartRound,
    Step,
    Update,
    Weights,
)
from edge_sdk.training.protocol.noise import Key, clip_samples, noised_features
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import load_weights, parted, read_weights

if TYPE_CHECKING:
    from edge_sdk.training.client import TrainingClient

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Open:
    """A batch between its forward and its backward half."""

    z: Tensor
    own: Tensor | None  # dLc/dz, through the exit head as it was before its step
    loss: float
    samples: int


class Half:
    """One client in one round: the prefix, the exit head and their optimisers.

    Methods whose clients do more derive from it and change the protected steps, `_forward` and
    `_close` and those they are made of.
    """

    def __init__(self, client: TrainingClient, start: StartRound) -> None:
        self.number = start.round
        self.client = client
        plan = self.plan = start.plan
        _check_data(client, plan)
        # JSON has no infinity: no limit is one thing, in a simulation and over a network
        self.clip = None if plan.part.clip in {None, math.inf} else plan.part.clip
        template = network_of(plan)
        self.stages = template.L
        if plan.part.whole:
            self.prefix: nn.Module = copied(template.segment(0, None))
        else:
            self.prefix = copied(template.prefix(plan.depth))
        self.prefix.to(client.device)
        self.head = None
        if plan.part.exit_head:
            self.head = copied(template.exit_head(plan.depth)).to(client.device)
        self._take(start.weights)
        self.prefix.train()
        self.parameters = list(self.prefix.parameters())
        self.optimiser = sgd(self.parameters, plan)
        self.head_optimiser = None
        if self.head is not None:
            self.head.train()
            self.head_optimiser = sgd(list(self.head.parameters()), plan)
        self.anchor = [p.detach().clone() for p in self.parameters] if plan.part.prox_mu else None
        self.samples = _Samples(client, plan, self.number)
        self.open: Open | None = None
        self.opened = 0  # batches up to the last one that was opened
        self.others = SecondBatches(client.name, client.samples, plan, self.number)
        self.noise_key: Key = ()
        self.given = 0  # batches of features that have left
        self.loss_sum = 0.0
        self.seen = self.done = self.supervised = 0

    def ready(self) -> Ready:
        """Counts, before the first batch."""
        counts: tuple[int, ...] = ()
        if self.plan.send_labels:
            counts = tuple(np.bincount(self.client.y, minlength=self.plan.classes).tolist())
        steps = 0 if self.plan.part.whole else self.samples.steps
        return Ready(self.number, self.client.samples, steps, counts)

    def step(self, message: Step) -> Features:
        """Close the batch before and open the one asked for.

        Raises: FrameError for a step that was opened already, whose second features would tell
            more of the same samples through any noise, and for one the round does not have.
        """
        if not self.opened <= message.step < self.samples.steps:
            raise FrameError(
                f"client {self.client.name}: no step {message.step}: expected {self.opened} to"
                f" {self.samples.steps - 1}"
            )
        self._close(message.feedback)
        x, y = self._batch(message.step, message.batch)
        # before the first view, whose way back needs BatchNorm as it leaves it
        other = self._second_view(y) if self.plan.part.views else None
        self.open = self._forward(x, y)
        self.opened = message.step + 1
        z, noise = self.open.z.detach(), self.plan.part.noise
        if noise is not None:
            z = noised_features(z, noise, self.noise_key, self.given)
        self.given += 1
        values, ranges = encode_batch(z, self.plan.training.codec)
        features = Features(
            self.number,
            message.step,
            values,
            y if self.plan.send_labels else None,
            None if self.head is None else self.open.loss,
            ranges,
        )
        return features if other is None else other.beside(features)

    def answer(self, message: Outputs) -> OutputGradient:  # noqa: ARG002 - for those that can
        """The gradient of the loss with respect to what the server made of the features.

        Raises: FrameError where the server's loss is the server's.
        """
        raise FrameError(f"client {self.client.name}: the plan has no loss on the server's outputs")

    def end(self, message: EndRound) -> Update:
        """Close the last batch and hand over what was learnt."""
        self._close(message.feedback)
        if self.plan.part.whole:
            self._train_whole()
        weights = read_weights(self.prefix)
        if self.head is not None:
            heads = {f"exit{self.plan.depth}.{k}": v for k, v in read_weights(self.head).items()}
            weights |= heads
            self._keep(heads)
        if self.plan.part.personal_share:
            self._keep(weights)
        mean_loss = self.loss_sum / max(self.seen, 1)
        return Update(
            self.number, weights, self.client.samples, mean_loss, self.done, self.supervised
        )

    def alone(self) -> Update:
        """The open batch and those left by the exit head alone    SuperSFL, Alg. 3."""
        if self.head is None:
            raise FrameError(
                f"client {self.client.name}: round {self.number} is given up: without an exit head"
                " there is nothing to learn by while the server is silent"
            )
        self._close(None)
        for step in range(self.opened, self.samples.steps):
            self.open = self._forward(*self._batch(step))
            self._close(None)
        return self.end(EndRound(self.number))

    def _keep(self, weights: Weights) -> None:
        """Have these for the rounds to come, whole or not at all.

        Where a round diverged, the next one starts from what was kept before it, or anew.
        """
        if all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
            self.client.personal |= {name: tensor.clone() for name, tensor in weights.items()}
            return
        logger.warning(
            "round=%d client=%s keeps none of %s and %d more: not finite",
            self.number,
            self.client.name,
            min(weights),
            len(weights) - 1,
        )

    def _take(self, weights: Weights) -> None:
        """Start the prefix and the head; in the first round a head is as its seed makes it."""
        start = start_of(self.plan, weights, self.client.personal)
        prefix, head = parted(start, self.plan.depth)
        load_weights(self.prefix, prefix)
        if self.head is not None and head:
            load_weights(self.head, head)

    def _batch(self, step: int, size: int | None = None) -> tuple[Tensor, Tensor]:
        return self._at(self.samples.rows(step, size))

    def _at(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """These of the client's samples."""
        x = torch.from_numpy(np.ascontiguousarray(self.client.x[rows]))
        device = self.client.device
        return x.to(device), torch.from_numpy(self.client.y[rows]).to(device)

    def _forward(self, x: Tensor, y: Tensor) -> Open:
        """The forward half and, with an exit head, one step of that head.

        SuperSFL, Alg. 2, phase 1. Of the client's own gradient the part at the cut is kept: the
        way back through the prefix is taken once it is known whether the server answers.
        """
        z = self._run(x)
        own, loss = None, 0.0
        if self.head is not None and self.head_optimiser is not None:
            own_loss = self._exit_loss(self.head(z), y)
            heads = list(self.head.parameters())
            own, *gradients = torch.autograd.grad(own_loss, [z, *heads])
            apply_step(self.head_optimiser, heads, gradients)
            loss = float(own_loss.detach())
        return Open(z, own, loss, len(y))

    def _exit_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Lc of the exit head's answers, ()."""
        return exit_loss(self.plan, self.number, logits, y)

    def _second_view(self, y: Tensor) -> SecondView | None:
        """Beside a batch of labels `y`: other samples through the prefix as it stands."""
        x2, y2 = self._at(self.others.rows(len(y)))
        statistics = [(buffer, buffer.clone()) for buffer in self.prefix.buffers()]
        with torch.no_grad():
            z = self._run(x2)
            for buffer, before in statistics:  # the first view's are those that count
                buffer.copy_(before)
        return SecondView.of(z, self.plan.depth, y == y2, self.plan)

    def _close(self, feedback: Feedback | None) -> None:
        """The backward half, with the server's feedback or without it (SuperSFL, Alg. 3).

        Without feedback and without an exit head there is nothing to learn from.
        """
        batch, self.open = self.open, None
        if batch is None or (feedback is None and batch.own is None):
            return
        self._step_prefix(self._gradient(batch, feedback))
        loss = batch.loss
        if feedback is not None:
            share = self._own_weight(batch, feedback)
            loss = share * batch.loss + (1 - share) * feedback.loss
            self.supervised += 1
        self._count(loss, batch.samples)

    def _gradient(self, batch: Open, feedback: Feedback | None) -> list[Tensor]:
        """Of the prefix: g_c alone, g_s alone, or the two joined (SuperSFL, Eq. 2-4)."""
        if feedback is None:
            assert batch.own is not None
            return clip_l2(self._pull(batch.z, batch.own), self.clip)
        gradient = feedback.gradient
        # of the sum: as good, and twice as fast as looking at each
        if gradient.shape != batch.z.shape or not math.isfinite(float(gradient.sum())):
            raise FrameError(
                f"client {self.client.name}: feedback: expected a finite gradient of shape"
                f" {tuple(batch.z.shape)}, got shape {tuple(gradient.shape)}"
            )
        if batch.own is None:
            return self._pull(batch.z, gradient)
        share = self._own_weight(batch, feedback)
        if self.clip is None:
            # both ways back are linear, so without a limit in between one does for the two
            return self._pull(batch.z, torch.lerp(gradient, batch.own, share))
        own = self._pull(batch.z, batch.own, keep=True)
        return fuse(clip_l2(own, self.clip), self._pull(batch.z, gradient), share)

    def _own_weight(self, batch: Open, feedback: Feedback) -> float:
        if batch.own is None:
            return 0.0
        return own_weight(self.plan, self.stages, batch.loss, feedback.loss)

    def _pull(self, z: Tensor, gradient: Tensor, *, keep: bool = False) -> list[Tensor]:
        """A gradient at the cut, taken back to the prefix's parameters."""
        return list(torch.autograd.grad(z, self.parameters, gradient, retain_graph=keep))

    def _train_whole(self) -> None:
        """Every batch of a client that holds the whole network."""
        for step in range(self.samples.steps):
            x, y = self._batch(step)
            loss = nn.functional.cross_entropy(self._run(x), y)
            self._step_prefix(list(torch.autograd.grad(loss, self.parameters)))
            self._count(float(loss.detach()), len(y))

    def _run(self, x: Tensor, prefix: nn.Module | None = None) -> Tensor:
        """Through the client's prefix, or another in its place."""
        try:
            z: Tensor = (self.prefix if prefix is None else prefix)(x)
        except ValueError as err:  # BatchNorm, where one sample leaves one value per channel
            raise FrameError(
                f"client {self.client.name}: a batch of {len(x)} cannot be trained: {err};"
                ' give it more samples or build the network with norm = "group"'
            ) from err
        noise = self.plan.part.noise
        if noise is None or noise.feature_clip is None or self.plan.part.whole:
            return z
        return clip_samples(z, noise.feature_clip)

    def _step_prefix(self, gradients: Sequence[Tensor]) -> None:
        if self.anchor is not None:
            # FedProx: the gradient of mu/2 * |w - w_start|^2
            gradients = [
                gradient + self.plan.part.prox_mu * (parameter.detach() - start)
                for gradient, parameter, start in zip(
                    gradients, self.parameters, self.anchor, strict=True
                )
            ]
        apply_step(self.optimiser, self.parameters, gradients)

    def _count(self, loss: float, samples: int) -> None:
        self.loss_sum += loss * samples
        self.seen += samples
        self.done += 1


def exit_loss(plan: Plan, number: int, logits: Tensor, y: Tensor) -> Tensor:
    """Of an exit head: cross-entropy or, where a gate goes by its evidence, BESplit's Eq. 5.

    Args:
        number: of the round. logits: (B, N). y: (B,).
    Returns: (), the mean over B.
    """
    rounds = plan.part.evidence_rounds
    if rounds is None:
        return nn.functional.cross_entropy(logits, y)
    losses = evidential_losses(logits, y, kl_weight_at(number, rounds))
    return losses.mean().to(logits.dtype)


def sgd(parameters: list[nn.Parameter], plan: Plan) -> Sgd:
    """The optimiser of the plan's numbers, over these parameters."""
    numbers = plan.training
    return Sgd(parameters, numbers.learning_rate, numbers.momentum, numbers.weight_decay)


def apply_step(
    optimiser: Sgd, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> None:
    """One step of the optimiser by these gradients, which are not kept."""
    optimiser.step(gradients, parameters)


def start_of(plan: Plan, sent: Weights, personal: Weights) -> Weights:
    """What a client starts from: the average, what is personal, or a mixture of the two.

    Args:
        sent: what the server sends. personal: what the client keeps to itself.
    Returns: as `sent`, and the client's own exit head where the server sends none; without a head
        where there is neither.
    """
    share = plan.part.personal_share
    start = {
        key: torch.lerp(value, personal[key], share) if share and key in personal else value
        for key, value in sent.items()
    }
    head = f"exit{plan.depth}."
    if not any(key.startswith(head) for key in sent):
        start |= {key: value for key, value in personal.items() if key.startswith(head)}
    return start


class _Samples:
    """Which of the client's samples make up each batch of a round."""

    def __init__(self, client: TrainingClient, plan: Plan, number: int) -> None:
        self._client = client.name
        self._count = client.samples
        numbers = plan.training
        self._batch = numbers.batch
        key = [plan.seed, number, crc32(client.name.encode())]
        self._generator = np.random.default_rng(key)
        self._batches = [] if numbers.iterations else self._epochs(numbers.epochs)
        self._endless = numbers.iterations is not None
        self._left = np.empty(0, np.int64)
        self.steps = numbers.iterations or len(self._batches)

    def rows(self, step: int, size: int | None) -> NDArray[np.int64]:
        """Of one batch; where the plan counts iterations, the next `size` of an endless stream.

        Raises: FrameError for a size where the plan counts epochs, or beyond the plan's batch.
        """
        if self._endless:
            if size is not None and not 1 <= size <= self._batch:
                raise FrameError(
                    f"client {self._client}: a batch of {size}: expected 1 to {self._batch}"
                )
            return self._take(self._batch if size is None else size)
        if size is not None:
            raise FrameError(
                f"client {self._client}: a batch of {size}: expected a plan with iterations"
            )
        return self._batches[step]

    def _epochs(self, epochs: int) -> list[NDArray[np.int64]]:
        n, batch = self._count, self._batch
        batches: list[NDArray[np.int64]] = []
        for _ in range(epochs):
            order = self._generator.permutation(n)
            # a last batch of one sample joins the one before it: BatchNorm cannot train on it
            ends = [at for at in range(batch, n, batch) if n - at > 1 or batch == 1]
            batches += np.split(order, ends)
        return batches

    def _take(self, size: int) -> NDArray[np.int64]:
        while len(self._left) < size:
            self._left = np.concatenate([self._left, self._generator.permutation(self._count)])
        taken, self._left = self._left[:size], self._left[size:]
        return taken


def _check_data(client: TrainingClient, plan: Plan) -> None:
    if len(client.x) != len(client.y) or not len(client.y):
        raise FrameError(
            f"client {client.name}: expected a label for each of one or more inputs,"
            f" got {len(client.x)} inputs and {len(client.y)} labels"
        )
    if client.x.shape[1:] != plan.input_shape:
        raise FrameError(
            f"client {client.name}: the plan is for inputs {plan.input_shape},"
            f" the data here are {client.x.shape[1:]}"
        )
    low, high = int(client.y.min()), int(client.y.max())
    if low < 0 or high >= plan.classes:
        raise FrameError(
            f"client {client.name}: the plan is for labels 0 to {plan.classes - 1},"
            " the data here have others"  # which ones is nobody else's to know
        )
