"""A method made of parts of others: one's clients, another's server step, a third one's weights.

    client   the client's half and what becomes of it: exit heads, labels, fine-tuning
    server   the server's step, its trunk, how a batch is shared out
    weigh    how much each client counts in aggregation, and the server's own vote

What contradicts is refused with a sentence, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from edge_sdk.errors import ConfigurationError
from server.training.method import Method
from server.training.server_steps import needs_labels

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "client": ("client", "labels", "share_exits", "finetune_steps", "finetune_rate"),
    "server": ("server_step", "trunk", "batch_share", "gives_outputs", "keeps_records"),
    "weigh": ("weigh", "server_weight", "reads_records"),
}


def combine(base: Method, parts: Mapping[str, Method]) -> Method:
    """`base` with some parts taken from other methods.

    Raises: ConfigurationError saying which parts do not go together, and why.
    """
    unknown = sorted(parts.keys() - FIELDS.keys())
    if unknown:
        raise ConfigurationError(
            f"parts: expected some of {', '.join(FIELDS)}, got {', '.join(unknown)}"
        )
    sources = dict.fromkeys(FIELDS, base) | dict(parts)
    for fault in _contradictions(**sources):
        raise ConfigurationError(f"parts: {fault}")
    taken: dict[str, Any] = {
        name: getattr(sources[part], name) for part, names in FIELDS.items() for name in names
    }
    others = [f"{parts[part].name} {part}" for part in FIELDS if part in parts]
    return replace(base, name=" + ".join([base.name, *others]), **taken)


def _contradictions(client: Method, server: Method, weigh: Method) -> Iterator[str]:
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
    if step is not None and not needs_labels(step) and client.name != server.name:
        yield (
            f"{server.name}'s server asks its clients to judge what it computes, {client.name}'s"
            f" clients do not know how: expected {server.name}'s client part with it"
        )
    if half.distil is not None and not server.gives_outputs:
        yield (
            f"{client.name}'s clients learn from the server's logits, {server.name}'s server"
            " returns none: expected the server part of the same method"
        )
    if weigh.reads_records and not server.keeps_records:
        yield (
            f"{weigh.name}'s weights come from records that its own server step keeps,"
            f" {server.name}'s keeps none: expected the server part of {weigh.name} with them"
        )
