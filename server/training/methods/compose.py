"""Methods made of parts of others: one's clients, another's server step, a third one's weights.

    client   the client's half: exit heads, labels, fine-tuning
    gate     the measure that gates the clients' exits, and so what their heads learn: entropy, or
             evidence (BESplit); the client's method gives it by default
    server   the server's step, its trunk, how a batch is shared out
    align    contrastive alignment of embeddings, by the server's stages alone (HARMONY); the
             server's method gives it by default
    weigh    the weights of the clients in aggregation, and the server's own

Two more parts join the client's half, whichever method that is from:

    auxiliary   a model of the client's own, which answers on the device (BESplit); it brings its
                gate by default
    guard       training of the prefix against inversion (SCALA)

Parts that contradict each other are refused with a sentence, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.protocol.client_part import ClientPart
from server.training.methods.method import Method
from server.training.methods.steps import needs_labels

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "client": (
        *("client", "labels", "share_exits"),
        *("finetune_steps", "finetune_rate", "refit_epochs"),
    ),
    "gate": ("evidence",),
    "server": ("server_step", "trunk", "batch_share", "gives_outputs", "keeps_records", "asks"),
    "align": ("align",),
    "weigh": ("weigh", "server_weight", "correct", "reads_records"),
}
# the parts that join the client's half, by the field of `ClientPart` that holds them
COMPANIONS: Final[Mapping[str, str]] = {"auxiliary": "distil", "guard": "inversion"}
PARTS: Final = (*FIELDS, *COMPANIONS)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The method that each part is taken from; `named` are the parts that a recipe names."""

    client: Method
    auxiliary: Method
    guard: Method
    gate: Method
    server: Method
    align: Method
    weigh: Method
    named: frozenset[str]


def combine(base: Method, parts: Mapping[str, Method]) -> Method:
    """Replace some parts of `base` by those of other methods.

    Raises: ConfigurationError saying which parts do not go together, and why.
    """
    unknown = sorted(parts.keys() - set(PARTS))
    if unknown:
        raise ConfigurationError(
            f"parts: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}"
        )
    client, server = parts.get("client", base), parts.get("server", base)
    auxiliary = parts.get("auxiliary", client)
    sources = _Sources(
        client,
        auxiliary,
        parts.get("guard", client),
        parts.get("gate", auxiliary),
        server,
        parts.get("align", server),
        parts.get("weigh", base),
        frozenset(parts),
    )
    for faults in (_of_companions, _of_steps, _of_gates, _of_alignment, _of_weights):
        for fault in faults(sources):
            raise ConfigurationError(f"parts: {fault}")
    taken: dict[str, Any] = {}
    for part in FIELDS:
        taken |= taken_from(part, getattr(sources, part))
    taken["client"] = _client_part(sources)
    others = [f"{parts[part].name} {part}" for part in PARTS if part in parts]
    return replace(base, name=" + ".join([base.name, *others]), **taken)


def taken_from(part: str, method: Method) -> dict[str, Any]:
    """The fields that a part takes from a method, by name."""
    if part in COMPANIONS:
        return {COMPANIONS[part]: getattr(method.client, COMPANIONS[part])}
    return {name: getattr(method, name) for name in FIELDS.get(part, ())}


def _client_part(of: _Sources) -> ClientPart:
    """The client's half with its companions and with what the other parts ask of it.

    Raises: ConfigurationError for parts that exclude each other.
    """
    half, align = of.client.client, of.align.align
    taken = taken_from("auxiliary", of.auxiliary) | taken_from("guard", of.guard)
    try:
        return replace(
            half,
            views=align is not None and align.weight > 0,
            evidence=of.gate.evidence if half.exit_head else None,
            **taken,
        )
    except ConfigurationError as err:
        raise ConfigurationError(f"parts: {err}") from err


def _of_companions(of: _Sources) -> Iterator[str]:
    """Whether there is something to join the client's half where it was asked for."""
    if "auxiliary" in of.named and of.auxiliary.client.distil is None:
        yield (
            f"{of.auxiliary.name}'s clients have no auxiliary model: expected besplit's auxiliary"
            " part, or none"
        )
    if "guard" in of.named and of.guard.client.inversion is None:
        yield (
            f"{of.guard.name}'s clients have no guard against inversion: expected scala's guard"
            " part with inversion above 0, or none"
        )


def _of_steps(of: _Sources) -> Iterator[str]:
    """Whether client and server understand each other."""
    client, server = of.client, of.server
    half, step = client.client, server.server_step
    if half.whole and step is not None:
        yield (
            f"{client.name}'s clients train the whole network, {server.name}'s server wants their"
            " features: expected a client part of a split method"
        )
    if not half.whole and step is None:
        yield (
            f"{client.name}'s clients send features, {server.name}'s server has no step for them:"
            " expected a server part of a split method"
        )
    if step is not None and needs_labels(step) and client.labels != "sent":
        yield (
            f"{server.name}'s server needs labels, {client.name} keeps them on its clients"
            f" (labels = {client.labels!r}): expected a server part that asks its clients, or a"
            " client part that sends labels"
        )
    if step is not None and not needs_labels(step) and half.answers not in server.asks:
        given = "none" if half.answers is None else f"that of its {half.answers}"
        yield (
            f"{server.name}'s server asks its clients for the gradient of its"
            f" {' or '.join(server.asks)}, {client.name}'s clients return {given}: expected"
            f" {server.name}'s client part, or another that returns it"
        )
    distil = of.auxiliary.client.distil
    # a client that answers the server's outputs knows the whole network's logits from them
    knows_logits = server.gives_outputs or half.answers is not None
    if distil is not None and distil.server_share and not knows_logits:
        yield (
            f"{of.auxiliary.name}'s clients learn from the server's logits, {server.name}'s server"
            " returns none: expected the server part of the same method, or server_share = 0"
        )


def _of_gates(of: _Sources) -> Iterator[str]:
    """Whether a named gate has an exit, and that exit learns what the gate measures."""
    half = of.client.client
    if "gate" not in of.named:
        return
    distil = of.auxiliary.client.distil
    if distil is not None and of.gate.gate != of.auxiliary.gate:
        yield (
            f"{of.auxiliary.name}'s auxiliary model learns evidence, {of.gate.name}'s gate goes by"
            f" {of.gate.gate}: expected {of.auxiliary.name}'s gate with it"
        )
    elif distil is None and not half.exit_head:
        yield (
            f"{of.client.name}'s clients have no exit that {of.gate.name}'s gate could open:"
            " expected a client part with exits, as supersfl's, or no gate part"
        )


def _of_alignment(of: _Sources) -> Iterator[str]:
    """Whether a named alignment exists, and its views fit the server."""
    half, align = of.client.client, of.align.align
    if align is None:
        if "align" in of.named:
            yield f"{of.align.name} aligns nothing: expected harmony's align part, or none"
        return
    if of.server.server_step is None:
        yield (
            f"{of.align.name}'s alignment is of embeddings on the server, {of.server.name}'s server"
            " has none: expected a server part of a split method"
        )
    if half.meta is not None and half.meta.early and of.server.trunk != "own":
        yield (
            f"{of.client.name}'s clients take second views at any depth, {of.server.name}'s server"
            f" trains what lies past the cut alone and cannot align them: expected"
            f" stochastic_depth = false for {of.client.name}'s client part"
        )


def _of_weights(of: _Sources) -> Iterator[str]:
    """Whether the weights have the records that they are made from."""
    if of.weigh.reads_records and not of.server.keeps_records:
        yield (
            f"{of.weigh.name}'s weights come from records that its own server step keeps,"
            f" {of.server.name}'s keeps none: expected the server part of {of.weigh.name} with them"
        )
    dynamic, averaged = of.client.client.dynamic, of.weigh.client.dynamic
    if dynamic != averaged:
        one, other = (of.client, of.weigh) if dynamic else (of.weigh, of.client)
        yield (
            f"{one.name} corrects its clients and their average by the same term, and {other.name}"
            f" by another or none (clients by {dynamic:g}, the average by {averaged:g}): expected"
            " the client part and the weigh part of one method with the same numbers"
        )
