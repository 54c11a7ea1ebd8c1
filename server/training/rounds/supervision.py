"""The server's answers to a step: features are decoded and checked, the method's step answers them.

Clients that stand out are answered apart from the others. Their batches do not step the one suffix
that all share, and do not change the method's memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch import Tensor

from edge_sdk.errors import FrameError
from edge_sdk.training.protocol.feature_codec import decode_batch
from edge_sdk.training.protocol.messages import (
    Features,
    Feedback,
    OutputGradient,
    Outputs,
    Request,
)
from edge_sdk.training.protocol.plan import Plan
from server.training.methods.steps import ClientBatch, ClientBatches
from server.training.rounds.context import RoundContext
from server.training.rounds.reply_checks import (
    Refusal,
    clip_features,
    gradient_fault,
    shapes_fault,
)
from server.training.rounds.round import RoundUnderWay, replies_of


def ask_features(
    context: RoundContext,
    now: RoundUnderWay,
    step: int,
    requests: Mapping[str, Request],
    shares: Mapping[str, int],
) -> dict[str, Features]:
    """The features of a step, decoded and found sound.

    Args:
        shares: samples in each client's batch, where the method shares the batch out.
    """
    replies = context.exchange(now, requests, context.settings.step_deadline_s)
    found = replies_of(Features, replies, now.number)
    features = {}
    for name in requests:
        if name not in found or found[name].step != step:
            now.missed[name] += 1
            continue
        try:
            plan = context.plans[name]
            features[name], clipped = _decoded(context, found[name], plan, shares.get(name))
        except FrameError as err:
            now.refuse(name, Refusal.of(err))
            continue
        if clipped:
            now.clip(name, clipped)
    return features


def answer_features(
    context: RoundContext, now: RoundUnderWay, step: int, features: Mapping[str, Features]
) -> dict[str, Feedback]:
    """The feedback of the server step, by client."""
    if not now.supervised or not features:
        return {}
    now.view.step = step
    batches = {
        name: ClientBatch(context.plans[name].depth, f, context.method.align)
        for name, f in features.items()
    }
    with context.using_state:
        outlying = context.suspects.find(now, batches)
    others = {name: batch for name, batch in batches.items() if name not in outlying}
    feedback = _server_step(context, now, others, frozen=False) if others else {}
    if outlying:
        memory = dict(now.view.memory)
        feedback |= _server_step(context, now, outlying, frozen=True)
        now.view.memory = memory
    return feedback


def _decoded(
    context: RoundContext, features: Features, plan: Plan, batch: int | None
) -> tuple[Features, int]:
    """The features as the client computed them, up to the codec's error, and how many are clipped.

    Raises: FrameError for features that are not sound.
    """
    with context.using_state:
        fault = shapes_fault(features, plan, context.state.shape_at, batch)
    if fault is not None:
        raise FrameError(fault)
    z, clipped = clip_features(decode_batch(features.features, features.ranges), "features")
    view = None
    if features.view is not None:
        view, more = clip_features(decode_batch(features.view, features.view_ranges), "view")
        clipped += more
    decoded = replace(features, features=z, ranges=None, view=view, view_ranges=None)
    return decoded, clipped


def _server_step(
    context: RoundContext, now: RoundUnderWay, batches: ClientBatches, *, frozen: bool
) -> dict[str, Feedback]:
    """The method's server step; it may ask the clients before it answers."""
    assert context.method.server_step is not None
    step = now.view.step
    with _stepping(context, frozen=frozen):
        answer = context.method.server_step(context.state, batches, now.view)
    if not isinstance(answer, Generator):
        return answer
    try:
        with _stepping(context, frozen=frozen):
            outputs = next(answer)
        while True:
            gradients = _ask_gradients(context, now, step, outputs)
            with _stepping(context, frozen=frozen):
                outputs = answer.send(gradients)
    except StopIteration as done:
        feedback: dict[str, Feedback] = done.value
        return feedback


@contextmanager
def _stepping(context: RoundContext, *, frozen: bool) -> Iterator[None]:
    with context.using_state, context.state.frozen() if frozen else nullcontext():
        yield


def _ask_gradients(
    context: RoundContext, now: RoundUnderWay, step: int, outputs: Mapping[str, Tensor]
) -> dict[str, OutputGradient]:
    """The gradients of the clients' losses with respect to the server's outputs, found sound."""
    requests: dict[str, Request] = {
        name: Outputs(now.number, step, tensor) for name, tensor in outputs.items()
    }
    replies = context.exchange(now, requests, context.settings.step_deadline_s)
    found = replies_of(OutputGradient, replies, now.number)
    gradients = {}
    for name, asked in outputs.items():
        if name not in found or found[name].step != step:
            now.missed[name] += 1
            continue
        fault = gradient_fault(found[name], asked)
        if fault is not None:
            now.refuse(name, fault)
            continue
        gradients[name] = found[name]
    return gradients
