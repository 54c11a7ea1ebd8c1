"""BESplit: votes by evidence, biased clients that make up for each other, an auxiliary model taught
by two teachers. docs/methods.md, BESplit.

    client, forward      z = W_C(x), to the server with its labels
    server
       pairs             the biased, by their records, matched as they are there    (Eq. 11, 33)
       exchange          over-represented samples change sides                (Eq. 12-14, 29-32)
       step              W_Sk on its batch, evidential loss with lam_t                   (Eq. 5)
       record            evidence and uncertainties by true class, each one's own      (Eq. 3-4)
    client, backward     W_C -= lr * J^T dL/dz
                         W_A: L_evid + lam_C * KD_C + lam_G * KD_G                   (Eq. 15-18)
    aggregate            records fade by staleness; W_C and W_S by evidence          (Eq. 6-10)

The server keeps, from round to round and in checkpoints:

    record/CLIENT   (N, N + 3) float64    round/CLIENT   when it last took part
    weight/CLIENT   of the round before   new/CLIENT     of the round under way, which `open` names
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from edge_sdk.checks import check_value
from edge_sdk.training.formulas.evidence import kl_weight_at
from edge_sdk.training.protocol.messages import Feedback
from edge_sdk.training.protocol.plan import AuxiliaryHead, ClientPart, Distillation
from profiles.checks import one_of, share, whole
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import Contributions, by_samples
from server.training.methods.formulas.client_records import (
    FACTORS,
    Factor,
    Missing,
    evidential_weights,
    label_shares,
    record_of,
    updated,
)
from server.training.methods.formulas.collaboration import counts_to_move, pairs_present
from server.training.methods.method import Method
from server.training.methods.smashed_exchange import Batches, Lesson, exchanged, learn, own_batch
from server.training.methods.steps import ClientBatches

Ablation = Literal[
    "none", "no_ea", "no_evidence", "no_aleatoric", "no_epistemic", "no_bcc", "no_dtd"
]

_AUXILIARY: Final = Distillation()  # whose numbers are the defaults

_COUNTED: Final[Mapping[str, Collection[Factor]]] = {
    "no_evidence": ("aleatoric", "epistemic"),
    "no_aleatoric": ("evidence", "epistemic"),
    "no_epistemic": ("evidence", "aleatoric"),
}


def besplit(
    *,
    ablation: Ablation = "none",
    missing: Missing = "mean",
    beta: float = 0.9,
    ttl: int = 100,
    anneal_rounds: int = _AUXILIARY.anneal_rounds,
    tau: float = _AUXILIARY.tau,
    client_share: float = _AUXILIARY.client_share,
    server_share: float = _AUXILIARY.server_share,
    auxiliary_head: AuxiliaryHead = _AUXILIARY.head,
) -> Method:
    """The method, or one of the ablations of its Table 4 by `ablation`.

    Args:
        ablation: `no_ea` weighs by n_k; the next three leave a factor out of the weights; `no_bcc`
            moves nothing; `no_dtd` has no auxiliary model.
        missing: how average uncertainties are joined over classes
            (server.training.methods.formulas.client_records).
        beta: share of the old record that is kept from one round to the next.
        ttl: rounds for which a client that is not seen is remembered.
        anneal_rounds: T of lam_t. tau, client_share, server_share, auxiliary_head: of the
            auxiliary model (edge_sdk.training.protocol.plan.Distillation).
    """
    check_value("ablation", ablation, one_of(get_args(Ablation)))
    check_value("missing", missing, one_of(get_args(Missing)))
    check_value("beta", beta, share)
    check_value("ttl", ttl, whole(1))
    distil = Distillation(auxiliary_head, client_share, server_share, tau, anneal_rounds)

    def step(state: ServerState, arrivals: ClientBatches, now: RoundView) -> dict[str, Feedback]:
        kl_weight = kl_weight_at(now.round, anneal_rounds)
        _open(now, beta, ttl)
        joint = {} if ablation == "no_bcc" else _exchanges(arrivals, now)
        lessons = _learn(state, arrivals, joint, kl_weight)
        _record(now, lessons)
        return {
            client: _feedback(lessons[client], outputs=ablation != "no_dtd")
            for client in arrivals
            if client in lessons
        }

    def weigh(contributions: Contributions, now: RoundView) -> dict[str, float]:
        records = _close(now, now.round, contributions, beta, ttl)
        if ablation == "no_ea":
            weights = by_samples(contributions, now)
        else:
            counted = _COUNTED.get(ablation, FACTORS)
            known = {client: records[client] for client in contributions if client in records}
            weights = _for_all(
                evidential_weights(known, missing=missing, factors=counted), contributions, now
            )
        for client, weight in weights.items():
            now.memory[f"weight/{client}"] = torch.tensor(weight, dtype=torch.float64)
        return weights

    return Method(
        "besplit",
        client=ClientPart(distil=None if ablation == "no_dtd" else distil),
        server_step=step,
        weigh=weigh,
        gives_outputs=ablation != "no_dtd",
        keeps_records=True,
        reads_records=ablation != "no_ea",
        evidence_rounds=anneal_rounds,
    )


def _exchanges(arrivals: ClientBatches, now: RoundView) -> dict[str, Batches]:
    """The batches of each pair of the step, under both clients' names; nobody waits for anybody.

    Pairs are of clients with the same cut: another's smashed samples do not fit a copy.
    """
    records = _part(now, "record")
    if not records:
        return {}
    shares, overall = label_shares(records)
    weights = _part(now, "weight")
    found: dict[str, Batches] = {}
    for depth in sorted({arrival.depth for arrival in arrivals.values()}):
        present = [client for client, arrival in arrivals.items() if arrival.depth == depth]
        for one, other in pairs_present(shares, overall, present):
            moves = {}
            for i, j in ((one, other), (other, one)):
                counts = torch.bincount(arrivals[i].labels.cpu(), minlength=len(overall))
                ahead = float(weights[i] - weights[j]) if {i, j} <= weights.keys() else 0.0
                moves[i, j] = counts_to_move(counts, shares[i], shares[j], overall, ahead)
            batches = exchanged(arrivals, moves, [now.plans[one].seed, now.round, now.step])
            if batches is not None:
                found |= {one: batches, other: batches}
    return found


def _learn(
    state: ServerState, arrivals: ClientBatches, joint: dict[str, Batches], kl_weight: float
) -> dict[str, Lesson]:
    """Every client's batch, of a pair or its own; those that cannot be learnt from are missing."""
    lessons: dict[str, Lesson] = {}
    for client, arrival in arrivals.items():
        if together := joint.get(client):
            lessons |= learn(state, arrivals, together, kl_weight) or {}
            for tried in together:  # a pair that cannot learn together is tried apart, once
                del joint[tried]
        if client not in lessons:
            lessons |= learn(state, arrivals, own_batch(client, arrival), kl_weight) or {}
    return lessons


def _feedback(lesson: Lesson, *, outputs: bool) -> Feedback:
    return Feedback(lesson.gradient, lesson.loss, lesson.outputs if outputs else None)


def _record(now: RoundView, lessons: Mapping[str, Lesson]) -> None:
    """Add a step's evidence to the records of the round, each sample to the client it is of."""
    for client, lesson in lessons.items():
        name = f"new/{client}"
        new = record_of(lesson.outputs, lesson.labels).cpu()
        now.memory[name] = now.memory[name] + new if name in now.memory else new


def _open(now: RoundView, beta: float, ttl: int) -> None:
    """Have records for this round.

    A recipe may take its weights from another method, which closes none: then all who were seen in
    the last round took part in it.
    """
    last = int(now.memory.get("open", torch.tensor(now.round)))
    if last != now.round:
        _close(now, last, _part(now, "new"), beta, ttl)
    now.memory["open"] = torch.tensor(now.round)


def _close(
    now: RoundView, number: int, took_part: Collection[str], beta: float, ttl: int
) -> dict[str, Tensor]:
    """Renew the records by round `number` (Eq. 6), and forget who has not been seen for long.

    What was seen of a client whose update does not count is left out with it.

    Returns: all records there are now.
    """
    memory = now.memory
    new, old, seen = _part(now, "new"), _part(now, "record"), _part(now, "round")
    for client in sorted(new.keys() & set(took_part)):
        last = int(seen.get(client, torch.tensor(number)))
        memory[f"record/{client}"] = updated(old.get(client), new[client], number - last, beta)
        memory[f"round/{client}"] = torch.tensor(number)
    for client, round_seen in _part(now, "round").items():
        if number - int(round_seen) >= ttl:
            del memory[f"record/{client}"], memory[f"round/{client}"]
    for kind in ("new", "weight"):
        for client in _part(now, kind):
            del memory[f"{kind}/{client}"]
    memory.pop("open", None)
    return _part(now, "record")


def _for_all(
    known: Mapping[str, float], contributions: Contributions, now: RoundView
) -> dict[str, float]:
    """A weight for every participant; one without a record (its update came late) has the mean.

    Where nobody has one, weights are by samples.
    """
    if not known:
        return by_samples(contributions, now)
    mean = sum(known.values()) / len(known)
    weights = {client: known.get(client, mean) for client in contributions}
    total = sum(weights.values())
    return {client: weight / total for client, weight in weights.items()}


def _part(now: RoundView, kind: str) -> dict[str, Tensor]:
    """What is kept under that name, by client; in one order, whatever a resumed run has read."""
    start = f"{kind}/"
    names = sorted(name for name in now.memory if name.startswith(start))
    return {name.removeprefix(start): now.memory[name].cpu() for name in names}
