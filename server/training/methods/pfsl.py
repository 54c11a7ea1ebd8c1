"""PFSL: a network split in three, the last layer fitted to each client. docs/methods/pfsl.md

Wadhwa et al., "PFSL: Personalized & Fair Split Learning with Data & Label Privacy for thin
clients", CCGrid 2023, as the authors' code has it (github.com/mnswdhw/PFSL):

    client, front     z = f(x), pre-trained and frozen
    server, middle    e = S_k(z), this client's copy of the middle
    client, back      L = CE(b_k(e), y);  b_k -= lr * dL/db_k
    server, middle    S_k -= lr * dL/dS_k
    aggregate         middles, the same weight for each client
    afterwards        fronts and middles are frozen, backs train alone: the personalisation

Differs: the backs are personal from the first round on and never leave their clients; the authors
average them until the personalisation. Fronts train and are averaged, unless `freeze_front` is set:
that needs a pre-trained network (`[train] start`). Clients train on all their batches; the authors
give each the number of the smallest client's.
"""

from __future__ import annotations

from edge_sdk.training.protocol.client_part import ClientPart, PersonalBack
from server.training.core.weighted_mean import equal
from server.training.methods.ask_clients import ask_clients
from server.training.methods.method import Method


def pfsl(refit_epochs: int = 1, freeze_front: bool = False) -> Method:
    """The method; for one client and without the personalisation it is plain SGD.

    Args:
        refit_epochs: passes of the personalisation over each client's samples; 0 leaves it out.
        freeze_front: keep the fronts as the server sends them.
    """
    back = PersonalBack(dropout=0.0, follow_accuracy=False)
    return Method(
        "pfsl",
        labels="derivable",
        client=ClientPart(back=back, frozen=freeze_front),
        server_step=ask_clients(),
        weigh=equal,
        asks=("embeddings",),
        refit_epochs=refit_epochs,
    )
