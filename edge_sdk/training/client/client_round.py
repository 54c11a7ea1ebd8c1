"""One round of training on a client.

ready      report the counts of samples, steps and labels
step       close the batch before with the server's feedback, open the next one: its features go up
answer     return the gradient of the server's outputs, in methods that keep labels on the client
end        close the last batch and hand over the weights
alone      finish the round without the server

A round without an adaptation and without companions is SplitFed's; with an exit head and gradient
fusion it is SuperSFL's.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from edge_sdk.bundles import namespaces
from edge_sdk.errors import FrameError
from edge_sdk.training.client.adaptation import Adaptation
from edge_sdk.training.client.auxiliary import AuxiliaryTrainer
from edge_sdk.training.client.batches import RoundBatches
from edge_sdk.training.client.companion import Companion, OpenBatch, Responder
from edge_sdk.training.client.exit_head import ExitHead
from edge_sdk.training.client.fusion import client_weight, fuse
from edge_sdk.training.client.inversion_guard import InversionGuard
from edge_sdk.training.client.personal_head import PersonalHead
from edge_sdk.training.client.prefix import Prefix
from edge_sdk.training.client.second_view import SecondView, second_sampler
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.client.whole.last_layer import split_last_layer, with_last_layer
from edge_sdk.training.client.whole.own_network import OwnNetwork
from edge_sdk.training.formulas.calibration import calibrated_loss, label_margins
from edge_sdk.training.formulas.sgd import clip_l2
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
)
from edge_sdk.training.protocol.noise import NoiseKey, noised_features
from edge_sdk.training.protocol.plan import network_of
from edge_sdk.training.protocol.weights import read_weights, split_exit_head, without_auxiliary


class ClientRound:
    """One client in one round.

    Args:
        state: what the client keeps between rounds; `end` writes its personal weights.
        noise_key: what the round's noise is drawn from; None for the round's first start.

    Attributes:
        prefix: the stages up to the cut. exit_head: None where the plan has none.
        adaptation: another way forward, where the plan asks for it (HARMONY).
        companions: what the client trains in addition.
        responder: the part that answers the server's outputs, if any.
    """

    def __init__(
        self, state: ClientState, start: StartRound, noise_key: NoiseKey | None = None
    ) -> None:
        plan, number = start.plan, start.round
        part = plan.part
        state.check_data(plan)
        self.state, self.start = state, start
        self.noise_key = noise_key or NoiseKey(state.secret, state.name, number, 0)
        self.plan, self.number = plan, number
        sent, head = split_exit_head(state.start_weights(plan, start.weights), plan.depth)
        weights = without_auxiliary(sent, plan.depth)
        if part.own_head:
            weights = with_last_layer(weights, plan, state.personal)
        self.prefix = Prefix(state, plan, weights)
        self.exit_head = ExitHead(state, plan, number, head) if part.exit_head else None
        self._stages = network_of(plan).L
        self.batches = RoundBatches(state.name, state.samples, plan, number)
        self._second = second_sampler(state.name, state.samples, plan, number)
        self.responder: Responder | None = None
        self.adaptation: Adaptation | None = None
        if part.meta is not None:
            assert self.exit_head is not None, "a plan with adaptation has an exit head"
            self.adaptation = self.responder = Adaptation(
                state,
                plan,
                self.prefix,
                self.exit_head,
                second=self._second,
                noise_key=self.noise_key,
            )
        companions: list[Companion] = []
        if part.distil is not None:
            companions.append(AuxiliaryTrainer(state, plan, number, sent))
        if part.inversion is not None:
            companions.append(InversionGuard(state, plan))
        if part.back is not None:
            self.responder = PersonalHead(state, plan, number)
            companions.append(self.responder)
        if part.own_network is not None:
            companions.append(OwnNetwork(state, plan, sent))
        self.companions = tuple(companions)
        # JSON has no infinity, so no limit is None here, in a simulation and over a network
        self._clip = None if part.clip in {None, math.inf} else part.clip
        self._batch: OpenBatch | None = None
        self._opened = 0  # batches up to the last one that was opened
        self._sent = 0  # batches of features that have left
        self._loss_sum = 0.0
        self._seen = self._done = self._supervised = 0

    def ready(self) -> Ready:
        """The counts that the server needs before the first batch."""
        counts: tuple[int, ...] = ()
        if self.plan.send_labels:
            counts = tuple(np.bincount(self.state.y, minlength=self.plan.classes).tolist())
        steps = 0 if self.plan.part.whole else self.batches.steps
        return Ready(self.number, self.state.samples, steps, counts)

    def step(self, message: Step) -> Features:
        """Close the batch before and open the one asked for.

        Raises: FrameError for a step that was opened already (its second features would tell more
            of the same samples through any noise), and for a step that the round does not have.
        """
        if not self._opened <= message.step < self.batches.steps:
            raise FrameError(
                f"client {self.state.name}: no step {message.step}: expected {self._opened} to"
                f" {self.batches.steps - 1}"
            )
        self._close(message.feedback)
        x, y = self.state.at(self.batches.rows(message.step, message.batch))
        # made before the first view, which needs BatchNorm unchanged until its way back
        view = self._second_view(y)
        batch = self._batch = self._forward(x, y)
        self._opened = message.step + 1
        z, noise = batch.z.detach(), self.plan.part.noise
        if noise is not None:
            z = noised_features(z, noise, self.noise_key, self._sent)
        self._sent += 1
        values, ranges = encode_batch(z, self.plan.training.codec)
        # the loss of a batch of one tells its label, so it stays where labels stay
        sends_loss = self.exit_head is not None and self.responder is None
        features = Features(
            self.number,
            message.step,
            values,
            y if self.plan.send_labels else None,
            batch.loss if sends_loss else None,
            ranges,
        )
        view = batch.view or view
        return features if view is None else view.added_to(features)

    def answer(self, message: Outputs) -> OutputGradient:
        """The gradient of the loss with respect to what the server made of the features.

        Raises: FrameError where the loss is the server's, and for outputs that do not belong to the
            open batch or come a second time: a second answer says more of the labels.
        """
        name, responder, batch = self.state.name, self.responder, self._batch
        if responder is None:
            raise FrameError(f"client {name}: the plan has no loss on the server's outputs")
        expected = (
            f"client {name}: outputs of step {message.step}: expected finite ones of the open batch"
        )
        if batch is None or batch.server_loss is not None or message.step != self._opened - 1:
            raise FrameError(f"{expected}, but no step {message.step} waits for outputs")
        outputs = message.outputs.to(self.state.device).detach().requires_grad_()
        shape = (len(batch.y), responder.width)
        # the sum is finite if each element is, and it is faster to check
        if outputs.shape != shape or not bool(torch.isfinite(outputs.sum())):
            raise FrameError(
                f"{expected}, {self.plan.part.answers} of shape {shape},"
                f" got shape {tuple(outputs.shape)}"
            )
        gradient, loss = responder.answer(batch, message.step, outputs)
        return OutputGradient(self.number, message.step, gradient.contiguous(), loss)

    def end(self, message: EndRound) -> Update:
        """Close the last batch, keep what is personal, and hand over what was learnt."""
        self._close(message.feedback)
        if self.plan.part.whole:
            self._train_whole()
        weights = read_weights(self.prefix.module)
        self.state.keep(self.prefix.kept(), self.number)
        if self.plan.part.own_head:
            weights, own = split_last_layer(weights, self.plan)
            self.state.keep(own, self.number)
        if self.exit_head is not None:
            namespace = namespaces.exit_head(self.plan.depth)
            head = namespace.prefixed(read_weights(self.exit_head.module))
            weights |= head
            self.state.keep(head, self.number)
        if self.plan.part.personal_share:
            self.state.keep(weights, self.number)
        if self.adaptation is not None:
            self.state.keep(self.adaptation.kept(), self.number)
        for companion in self.companions:
            self.state.keep(companion.kept(), self.number)
            weights |= companion.sent()
        return Update(
            self.number,
            weights,
            self.state.samples,
            self._loss_sum / max(self._seen, 1),
            self._done,
            self._supervised,
        )

    def alone(self) -> Update:
        """Finish the round without the server: the open batch and those left    SuperSFL, Alg. 3

        Raises: FrameError where no part of the client learns without the server.
        """
        if self.exit_head is None and not any(each.learns_alone for each in self.companions):
            raise FrameError(
                f"client {self.state.name}: round {self.number} is given up: the server is silent,"
                " and a client without an exit head cannot go on alone"
            )
        self._close(None)
        for step in range(self._opened, self.batches.steps):
            self._batch = self._forward(*self.state.at(self.batches.rows(step, None)))
            self._close(None)
        return self.end(EndRound(self.number))

    def _forward(self, x: Tensor, y: Tensor) -> OpenBatch:
        """The forward half."""
        if self.adaptation is None:
            batch = self._through_prefix(x, y)
        else:
            batch = self.adaptation.forward(x, y)
        for companion in self.companions:
            companion.forward(batch)
        return batch

    def _through_prefix(self, x: Tensor, y: Tensor) -> OpenBatch:
        """Through the prefix and, with an exit head, to the gradients of the client's own loss.

        SuperSFL, Alg. 2, phase 1. The batch keeps them: the steps of the head and of the prefix
        wait until it is known whether the server answers.
        """
        batch = OpenBatch(x, y, self.prefix.run(x), self.prefix.parameters)
        if self.exit_head is not None:
            loss = self.exit_head.loss(self.exit_head.module(batch.z), y)
            batch.own, *batch.head = torch.autograd.grad(
                loss, [batch.z, *self.exit_head.parameters]
            )
            batch.loss = float(loss.detach())
        return batch

    def _second_view(self, y: Tensor) -> SecondView | None:
        """Other samples through the prefix as it is, for a batch of labels `y`.

        None if the plan asks for none, or if the adaptation makes it.
        """
        if self.adaptation is not None or not self.plan.part.views:
            return None
        x2, y2 = self.state.at(self._second.take(len(y)))
        statistics = [(buffer, buffer.clone()) for buffer in self.prefix.module.buffers()]
        with torch.no_grad():
            z = self.prefix.run(x2)
            for buffer, before in statistics:  # only the first view counts in the statistics
                buffer.copy_(before)
        return SecondView.encode(z, self.plan.depth, y == y2, self.plan)

    def _close(self, feedback: Feedback | None) -> None:
        """The backward half, with the server's feedback or without it (SuperSFL, Alg. 3).

        Without feedback and without an exit head the prefix has nothing to learn from.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            return
        share = 1.0
        if feedback is not None:
            if batch.server_loss is not None:
                feedback = replace(feedback, loss=batch.server_loss)
            if feedback.outputs is not None:
                batch.logits = feedback.outputs
            share = self._client_weight(batch, feedback)
        if self.exit_head is not None:
            self.exit_head.step(batch.head, share)
        if feedback is not None or batch.own is not None:
            self.prefix.step(self._gradient(batch, feedback, share))
            loss = batch.loss
            if feedback is not None:
                loss = share * batch.loss + (1 - share) * feedback.loss
                self._supervised += 1
            self._count(loss, len(batch.y))
        for companion in self.companions:
            companion.close(batch)

    def _client_weight(self, batch: OpenBatch, feedback: Feedback) -> float:
        if batch.own is None:
            return 0.0
        return client_weight(self.plan, self._stages, batch.loss, feedback.loss)

    def _gradient(self, batch: OpenBatch, feedback: Feedback | None, share: float) -> list[Tensor]:
        """The prefix's gradients: client's and server's joined, plus each companion's in full."""
        pulls = [
            batch.pull(gradient, keep=True)
            for companion in self.companions
            if (gradient := companion.gradient(batch)) is not None
        ]
        joined = self._fused(batch, feedback, share)
        for pull in pulls:
            joined = [one + other for one, other in zip(joined, pull, strict=True)]
        # with an exit head the limit is on the client's own gradient, before it is joined
        return clip_l2(joined, self._clip if batch.own is None else None)

    def _fused(self, batch: OpenBatch, feedback: Feedback | None, share: float) -> list[Tensor]:
        """g_c alone, g_s alone, or the two joined (SuperSFL, Eq. 2-4)."""
        if feedback is None:
            assert batch.own is not None
            return clip_l2(batch.pull(batch.own), self._clip)
        gradient = feedback.gradient
        # the sum is finite if each element is, and it is twice as fast to check
        if gradient.shape != batch.z.shape or not math.isfinite(float(gradient.sum())):
            raise FrameError(
                f"client {self.state.name}: feedback: expected a finite gradient of shape"
                f" {tuple(batch.z.shape)}, got shape {tuple(gradient.shape)}"
            )
        if batch.own is None:
            return batch.pull(gradient)
        if self._clip is None:
            # both ways back are linear, so without a limit in between one does for the two
            return batch.pull(torch.lerp(gradient, batch.own, share))
        own = batch.pull(batch.own, keep=True)
        return fuse(clip_l2(own, self._clip), batch.pull(gradient), share)

    def _train_whole(self) -> None:
        """Every batch of a client that holds the whole network."""
        margins = self._margins()
        for step in range(self.batches.steps):
            x, y = self.state.at(self.batches.rows(step, None))
            batch = OpenBatch(x, y, self.prefix.run(x), self.prefix.parameters)
            if margins is None:
                loss = nn.functional.cross_entropy(batch.z, y)
            else:
                loss = calibrated_loss(batch.z, y, margins)
            self.prefix.step(torch.autograd.grad(loss, self.prefix.parameters))
            self._count(float(loss.detach()), len(y))
            for companion in self.companions:
                companion.close(batch)

    def _margins(self) -> Tensor | None:
        """FedLC's margins of the client's labels, (N,); None for plain cross-entropy."""
        tau = self.plan.part.calibration
        if not tau:
            return None
        counts = np.bincount(self.state.y, minlength=self.plan.classes)
        return label_margins(torch.from_numpy(counts), tau).to(self.state.device)

    def _count(self, loss: float, samples: int) -> None:
        self._loss_sum += loss * samples
        self._seen += samples
        self._done += 1
