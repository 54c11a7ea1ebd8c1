"""MergeSFL: merged features, and batches by the speed of each worker. docs/methods/mergesfl.md

Liao et al., "MergeSFL: Split Federated Learning with Feature Merging and Batch Size Regulation",
ICDE 2024:

    start          d_k = max(1, floor(D * t_min / t_k))         the fastest worker takes D samples
                   t_min is the fastest client's, whether it takes part or not
    each step
      workers      z_k = f_k(x_k) of d_k samples; z_k and y_k go up
      server       one forward and one step over the merged features [z_1, ..., z_K]
                   each worker gets the gradient of its own rows
    aggregate      prefixes by d_k

t_k is the time of one sample at worker k, 1 / speed_k; a recipe declares the speeds.

Differs: participants are drawn as in every method here. The paper's server selects them by a
genetic algorithm, so that the labels of a merged batch are as those of all data within a limit of
the bandwidth, measures the times, and takes t_min from the workers of the round: there d_k depends
on who else is present. A worker's gradient is that of the mean over its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from edge_sdk.errors import ConfigurationError
from server.training.core.round_view import RoundView
from server.training.core.weighted_mean import Contributions, scaled
from server.training.methods.method import Method
from server.training.methods.steps import concatenated


def mergesfl(speeds: tuple[float, ...] = (1.0,)) -> Method:
    """The method; with equal speeds it is Minibatch-SFL with equal weights.

    Args:
        speeds: samples that the workers train on per unit of time, in turn over the clients by
            name; only their ratios count. On devices, a new device moves the places of those
            after it, and so changes their speeds.

    Raises: ConfigurationError for no speed, and for one that is not above 0.
    """
    if not speeds or not all(speed > 0 for speed in speeds):
        raise ConfigurationError(
            f"speeds: expected one or more numbers above 0, got {list(speeds)}"
        )
    return Method(
        "mergesfl",
        server_step=concatenated,
        batch_share=partial(by_speed, speeds=tuple(speeds)),
        weigh=partial(by_batch, speeds=tuple(speeds)),
    )


def by_speed(
    samples: Mapping[str, int], batch: int, now: RoundView, *, speeds: Sequence[float]
) -> dict[str, int]:
    """Batches d_k by which all participants need the same time for a step.

    They do not depend on who is present, so a client has one batch in every cohort, and its weight
    is by the batch that it trained.

    Args:
        samples: of the participants. batch: D, of the fastest of all clients.
    """
    own = speeds_of(now, speeds)
    fastest = max(own.values())
    # 0.7 / 0.1 is slightly less than 7
    return {client: max(1, int(batch * own[client] / fastest + 1e-9)) for client in samples}


def by_batch(
    contributions: Contributions, now: RoundView, *, speeds: Sequence[float]
) -> dict[str, float]:
    """Weights by batch: d_k / sum d_j; none where every client of a round stood out."""
    if not contributions:
        return {}
    batch = max(now.plans[client].training.batch for client in contributions)
    return scaled(by_speed(dict.fromkeys(contributions, 1), batch, now, speeds=speeds))


def speeds_of(now: RoundView, speeds: Sequence[float]) -> dict[str, float]:
    """The speed of every client, in turn over the clients as plans have them: devices by name."""
    return {client: speeds[place % len(speeds)] for place, client in enumerate(now.plans)}
