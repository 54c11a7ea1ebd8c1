"""BESplit: weights by evidence, biased clients that exchange samples, an auxiliary model with two
teachers. docs/methods/besplit.md.

    client, forward      z = W_C(x), to the server with its labels
    server
       pairs             the biased clients by their records, matched greedily     (Eq. 11, 33)
       exchange          over-represented samples change sides                (Eq. 12-14, 29-32)
       step              W_Sk on its batch, evidential loss with lam_t                   (Eq. 5)
       record            evidence and uncertainties by true class, each one's own      (Eq. 3-4)
       teach             logits of W_g, the server's stages of the round's start        (Eq. 15)
    client, backward     W_C -= lr * J^T dL/dz
                         W_A: L_evid + lam_C * KD_C + lam_G * KD_G                   (Eq. 15-18)
    aggregate            records fade by staleness; W_C, W_S and W_A by evidence     (Eq. 6-10)

`RecordMemory` keeps, from round to round and in checkpoints:

    record/CLIENT   (N, N + 3) float64    round/CLIENT   when it last took part
    weight/CLIENT   of the round before   new/CLIENT     of the round under way, which `open` names
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from edge_sdk.checks import check_value
from edge_sdk.gate_form import Activation
from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss
from edge_sdk.training.protocol.client_part import AuxiliaryHead, ClientPart, Distillation
from edge_sdk.training.protocol.messages import Feedback
from edge_sdk.training.streams import Stream
from profiles.checks import number, one_of, optional, share, whole
from server.training.core.memory import MemoryPart
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.core.trimmed_mean import cap_weights
from server.training.core.weighted_mean import Contributions, by_samples, equal, scaled
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
from server.training.methods.smashed_exchange import (
    BatchResult,
    HostBatches,
    Losses,
    exchanged,
    own_batch,
    step_hosts,
)
from server.training.methods.steps import ClientBatch, ClientBatches

Sharing = Literal["averaged", "personal"]
NoEa = Literal["equal", "samples"]
Ablation = Literal[
    "none", "no_ea", "no_evidence", "no_aleatoric", "no_epistemic", "no_bcc", "no_dtd"
]

# the sources of the defaults
_AUXILIARY: Final = Distillation()
_EVIDENCE: Final = EvidentialLoss()

_COUNTED: Final[Mapping[str, Collection[Factor]]] = {
    "no_evidence": ("aleatoric", "epistemic"),
    "no_aleatoric": ("evidence", "epistemic"),
    "no_epistemic": ("evidence", "aleatoric"),
}


def besplit(
    *,
    ablation: Ablation = "none",
    no_ea: NoEa = "equal",
    missing: Missing = "full",
    weight_power: float = 1.0,
    weight_cap: float | None = None,
    beta: float = 0.9,
    ttl: int = 100,
    evidence: Activation = _EVIDENCE.activation,
    kl_share: float = _EVIDENCE.kl_share,
    anneal_rounds: int = _EVIDENCE.anneal_rounds,
    tau: float = _AUXILIARY.tau,
    client_share: float = _AUXILIARY.client_share,
    server_share: float = _AUXILIARY.server_share,
    auxiliary: Sharing = "averaged",
    auxiliary_head: AuxiliaryHead = _AUXILIARY.head,
) -> Method:
    """The method, or one of the ablations of its Table 4 by `ablation`.

    Args:
        ablation: `no_ea` weighs without evidence; the next three leave a factor out of the weights;
            `no_bcc` exchanges no samples; `no_dtd` has no auxiliary model.
        no_ea: the weights of that ablation: the same for all, a simple average, or n_k.
        missing: how average uncertainties are joined over classes
            (server.training.methods.formulas.client_records).
        weight_power: of the weights; 1 is the paper's, 0 gives the same to all.
        weight_cap: largest weight as a multiple of the median; None for no limit.
        beta: share of the old record that is kept from one round to the next.
        ttl: rounds for which a client that takes no part is remembered.
        evidence, kl_share, anneal_rounds: the activation, and lam_t of the loss
            (edge_sdk.training.formulas.evidential_loss).
        auxiliary: `averaged` over the clients of a cut, by the round's weights; `personal` keeps
            each client's own on it, as the paper says.
        tau, client_share, server_share, auxiliary_head: of the auxiliary model
            (edge_sdk.training.protocol.client_part.Distillation).
    """
    check_value("ablation", ablation, one_of(get_args(Ablation)))
    check_value("no_ea", no_ea, one_of(get_args(NoEa)))
    check_value("missing", missing, one_of(get_args(Missing)))
    check_value("weight_power", weight_power, number(least=0))
    check_value("weight_cap", weight_cap, optional(number(least=1)))
    check_value("auxiliary", auxiliary, one_of(get_args(Sharing)))
    check_value("beta", beta, share)
    check_value("ttl", ttl, whole(1))
    loss = EvidentialLoss(evidence, kl_share, anneal_rounds)
    distil = Distillation(
        auxiliary_head,
        client_share,
        server_share,
        tau,
        evidence=loss,
        averaged=auxiliary == "averaged",
    )

    def step(state: ServerState, batches: ClientBatches, now: RoundView) -> dict[str, Feedback]:
        losses_of = partial(
            evidential_losses, kl_weight=loss.kl_weight(now.round), activation=evidence
        )
        memory = RecordMemory(now.memory)
        memory.open(now.round, beta, ttl)
        joint = {} if ablation == "no_bcc" else _exchanges(batches, memory, now)
        results = _learn(state, batches, joint, losses_of)
        for client, result in results.items():
            memory.record(client, result, evidence)
        return {
            client: Feedback(
                results[client].gradient, results[client].loss, teach(state, batches[client])
            )
            for client in batches
            if client in results
        }

    def teach(state: ServerState, batch: ClientBatch) -> Tensor | None:
        features = batch.features.features
        return None if ablation == "no_dtd" else state.rest_logits(batch.depth, features)

    def weigh(contributions: Contributions, now: RoundView) -> dict[str, float]:
        memory = RecordMemory(now.memory)
        memory.close(now.round, contributions, beta, ttl)
        if ablation == "no_ea":
            weights = (equal if no_ea == "equal" else by_samples)(contributions, now)
        else:
            counted = _COUNTED.get(ablation, FACTORS)
            records = _on_cpu(memory.records)
            known = {client: records[client] for client in contributions if client in records}
            earned = evidential_weights(known, missing=missing, factors=counted, power=weight_power)
            weights = _for_all(earned, contributions, now)
            if weight_cap is not None:
                weights = scaled(cap_weights(weights, weight_cap))
        for client, weight in weights.items():
            memory.weights[client] = torch.tensor(weight, dtype=torch.float64)
        return weights

    return Method(
        "besplit",
        client=ClientPart(distil=None if ablation == "no_dtd" else distil),
        server_step=step,
        weigh=weigh,
        gives_outputs=ablation != "no_dtd",
        keeps_records=True,
        reads_records=ablation != "no_ea",
        evidence=loss,
    )


class RecordMemory:
    """The client records in the method's memory, and what the round under way adds to them.

    A recipe may take its weights from another method, which closes no round. Then all clients with
    new records took part in the last round.

    Attributes:
        records: by client, (N, N + 3) float64 (server.training.methods.formulas.client_records).
        rounds: the round in which each last took part.
        weights: each one's share in the last merge.
        new: the round's own records, not yet in `records`.
    """

    def __init__(self, memory: dict[str, Tensor]) -> None:
        self._memory = memory
        self.records = MemoryPart(memory, "record")
        self.rounds = MemoryPart(memory, "round")
        self.weights = MemoryPart(memory, "weight")
        self.new = MemoryPart(memory, "new")

    def open(self, number: int, beta: float, ttl: int) -> None:
        """Prepare the client records for this round."""
        last = int(self._memory.get("open", torch.tensor(number)))
        if last != number:
            self.close(last, self.new.keys(), beta, ttl)
        self._memory["open"] = torch.tensor(number)

    def record(self, client: str, result: BatchResult, activation: Activation = "exp") -> None:
        """Add a step's evidence to the client that the samples are of."""
        new = record_of(result.outputs, result.labels, activation).cpu()
        self.new[client] = self.new[client] + new if client in self.new else new

    def close(self, number: int, took_part: Collection[str], beta: float, ttl: int) -> None:
        """Renew the records by round `number` (Eq. 6), and forget clients not seen for long.

        The new record of a client is dropped if its update does not count.
        """
        new, old = _on_cpu(self.new), _on_cpu(self.records)
        for client in sorted(new.keys() & set(took_part)):
            last = int(self.rounds.get(client, torch.tensor(number)))
            self.records[client] = updated(old.get(client), new[client], number - last, beta)
            self.rounds[client] = torch.tensor(number)
        for client, seen in list(self.rounds.items()):
            if number - int(seen) >= ttl:
                del self.records[client], self.rounds[client]
        self.new.clear()
        self.weights.clear()
        self._memory.pop("open", None)


def _exchanges(
    batches: ClientBatches, memory: RecordMemory, now: RoundView
) -> dict[str, HostBatches]:
    """The batches of each pair of the step, under both clients' names.

    Pairs are matched among those present, of clients with the same cut: another's features do not
    fit a copy.
    """
    records = _on_cpu(memory.records)
    if not records:
        return {}
    shares, overall = label_shares(records)
    weights = _on_cpu(memory.weights)
    found: dict[str, HostBatches] = {}

    def draws(client: str) -> np.random.Generator:
        seed = now.plans[client].seed
        return Stream.EXCHANGE.generator(seed, round=now.round, step=now.step, client=client)

    for depth in sorted({batch.depth for batch in batches.values()}):
        present = [client for client, batch in batches.items() if batch.depth == depth]
        for one, other in pairs_present(shares, overall, present):
            moves = {}
            for i, j in ((one, other), (other, one)):
                counts = torch.bincount(batches[i].labels.cpu(), minlength=len(overall))
                ahead = float(weights[i] - weights[j]) if {i, j} <= weights.keys() else 0.0
                moves[i, j] = counts_to_move(counts, shares[i], shares[j], overall, ahead)
            pair = exchanged(batches, moves, draws)
            if pair is not None:
                found |= {one: pair, other: pair}
    return found


def _learn(
    state: ServerState,
    batches: ClientBatches,
    joint: dict[str, HostBatches],
    losses_of: Losses,
) -> dict[str, BatchResult]:
    """Step on every client's batch, shared with its pair or its own.

    Clients of a batch that cannot be learnt from are left out.
    """
    results: dict[str, BatchResult] = {}
    for client, batch in batches.items():
        if together := joint.get(client):
            results |= step_hosts(state, batches, together, losses_of) or {}
            for tried in together:  # a pair that cannot learn together is tried apart, once
                del joint[tried]
        if client not in results:
            results |= step_hosts(state, batches, own_batch(client, batch), losses_of) or {}
    return results


def _for_all(
    known: Mapping[str, float], contributions: Contributions, now: RoundView
) -> dict[str, float]:
    """Weights of all participants; one without a record (its update came late) has the mean.

    Where no participant has a record, weights are by samples.
    """
    if not known:
        return by_samples(contributions, now)
    mean = sum(known.values()) / len(known)
    return scaled({client: known.get(client, mean) for client in contributions})


def _on_cpu(part: MemoryPart) -> dict[str, Tensor]:
    return {client: tensor.cpu() for client, tensor in part.items()}
