"""Partitions: the papers' rules for dealing a data set out to clients.

Every function takes the labels and a seed and returns one array of indices a client. The same
arguments give the same parts on every machine; parts never share a sample, and together they hold
all samples unless the function says otherwise.

docs/methods/common.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.checks import check_value
from edge_sdk.errors import ConfigurationError
from edge_sdk.training.streams import Stream
from profiles.checks import number, whole

Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
Parts = list[Indices]

LEAST: Final = 10
REDRAWS: Final = 10_000


def partition(
    name: str,
    y: Labels,
    clients: int,
    seed: int,
    *,
    groups: NDArray[Any] | None = None,
    **numbers: float,
) -> Parts:
    """Deal the samples out by the rule of that name.

    Args:
        name: `iid`, `shards`, `dirichlet`, `dirichlet-client`, `dirichlet-equal`, `quantity`,
            `udd`, `uds`, `udds` or `natural`.
        y: (n,) labels.
        groups: (n,) the person that each sample is of; only for `natural`.
        numbers: the rule's own, as its function names them.
    Returns: `clients` arrays of indices into y.
    Raises: ConfigurationError naming the known rules, the numbers of a rule, or why the rule
        cannot deal out these samples.
    """
    if name == "natural":
        if numbers:
            raise ConfigurationError(f"partition natural: expected no numbers, got {numbers}")
        return natural(groups, clients)
    try:
        rule = RULES[name]
    except KeyError:
        known = ", ".join((*RULES, "natural"))
        raise ConfigurationError(f"partition {name!r}: expected one of {known}") from None
    parameters = inspect.signature(rule).parameters.values()
    known_numbers = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(set(numbers) - set(known_numbers))
    if unknown:
        has = ", ".join(known_numbers) or "no numbers"
        raise ConfigurationError(f"partition {name}: expected {has}, got {', '.join(unknown)}")
    return rule(y, clients, seed, **numbers)


def iid(y: Labels, clients: int, seed: int) -> Parts:
    """Equal parts at random; sizes differ by one at most."""
    _check("iid", y, clients)
    return np.array_split(_generator(Stream.PARTITION, seed).permutation(len(y)), clients)


def shards(y: Labels, clients: int, seed: int, *, per_client: int = 2, total: int = 100) -> Parts:
    """Sort by label, cut into equal shards, give each client `per_client` of them at random.

    Shard-s of HARMONY and SplitGP. If clients * per_client < total, the remaining shards are left
    out.
    """
    _check("shards", y, clients)
    check_value("partition shards: per_client", per_client, whole(1))
    check_value("partition shards: total", total, whole(1))
    if total > len(y):
        raise ConfigurationError(
            f"partition shards: expected at most {len(y)} shards, one a sample, got {total}"
        )
    if clients * per_client > total:
        raise ConfigurationError(
            f"partition shards: expected at most {total} shards in all, got {clients} clients"
            f" with {per_client} each; set total = {clients * per_client}"
        )
    pieces = np.array_split(np.argsort(y, kind="stable"), total)
    order = _generator(Stream.PARTITION, seed).permutation(total)[: clients * per_client]
    return [
        np.concatenate([pieces[piece] for piece in mine])
        for mine in order.reshape(clients, per_client)
    ]


def dirichlet(
    y: Labels, clients: int, seed: int, *, concentration: float = 0.5, least: int = LEAST
) -> Parts:
    """Split each class over the clients by a draw from Dir(concentration).

    BESplit, E.2 (its kappa); SuperSFL uses 0.5. Redrawn until every client has `least` samples
    (docs/methods/common.md: 10).
    """
    _check("dirichlet", y, clients)
    check_value("partition dirichlet: concentration", concentration, number(above=0))
    pools = _classes(y)

    def draw(rng: np.random.Generator) -> NDArray[np.float64]:
        return rng.dirichlet(np.full(clients, concentration), len(pools)).T

    return _by_shares("dirichlet", pools, clients=clients, seed=seed, least=least, draw=draw)


def dirichlet_client(
    y: Labels, clients: int, seed: int, *, concentration: float = 0.5, least: int = LEAST
) -> Parts:
    """Each client draws its share of every class from Dir(concentration) over the classes.

    SCALA, V-A (its beta). Class j goes to the clients in proportion to their shares of j, so that
    all samples are dealt out. Redrawn until every client has `least` samples.
    """
    _check("dirichlet-client", y, clients)
    check_value("partition dirichlet-client: concentration", concentration, number(above=0))
    pools = _classes(y)

    def draw(rng: np.random.Generator) -> NDArray[np.float64]:
        shares = rng.dirichlet(np.full(len(pools), concentration), clients)
        sums = shares.sum(0)
        # a class without any share (tiny concentrations underflow) is split equally
        return np.where(sums > 0, shares / np.where(sums > 0, sums, 1), 1 / clients)

    return _by_shares("dirichlet-client", pools, clients=clients, seed=seed, least=least, draw=draw)


def dirichlet_equal(y: Labels, clients: int, seed: int, *, concentration: float = 0.1) -> Parts:
    """Clients of one size, floor(n / clients), each with its own Dir(concentration) over classes.

    HARMONY, Table 5 (its alpha_D), as inferred from it. All clients fill up at the same time. If
    they ask for more samples of a class than are left, the samples are drawn by lot, and a client
    that is short asks again among the classes that have samples left. n mod clients samples are
    left out.
    """
    _check("dirichlet-equal", y, clients)
    check_value("partition dirichlet-equal: concentration", concentration, number(above=0))
    rng, pools = _generator(Stream.PARTITION, seed), _classes(y)
    wish = rng.dirichlet(np.full(len(pools), concentration), clients)
    left = np.array([len(pool) for pool in pools])
    counts = np.zeros((clients, len(pools)), np.int64)
    size = len(y) // clients
    while (short := size - counts.sum(1)).any():  # each turn fills everyone or empties a class
        asked = np.stack([rng.multinomial(short[k], _open(wish[k], left)) for k in range(clients)])
        for c in range(len(pools)):
            granted = asked[:, c]
            if granted.sum() > left[c]:
                granted = rng.multivariate_hypergeometric(granted, left[c])
            counts[:, c] += granted
            left[c] -= granted.sum()
    return _deal(rng, pools, counts)


def quantity(y: Labels, clients: int, seed: int, *, per_client: int = 2) -> Parts:
    """Cut each class into s * clients / classes parts, give each client s parts at random.

    SCALA's quantity-based skew, V-A; s is `per_client`. A client has at most s classes.
    """
    _check("quantity", y, clients)
    check_value("partition quantity: per_client", per_client, whole(1))
    rng, pools = _generator(Stream.PARTITION, seed), _classes(y)
    pieces, rest = divmod(per_client * clients, len(pools))
    if rest:
        step = len(pools) // math.gcd(clients, len(pools))
        raise ConfigurationError(
            f"partition quantity: expected per_client * clients to be a multiple of the"
            f" {len(pools)} classes, got {per_client} * {clients};"
            f" set per_client to a multiple of {step}"
        )
    smallest = min(map(len, pools))
    if pieces > smallest:
        raise ConfigurationError(
            f"partition quantity: expected at most {smallest} parts a class, the samples of the"
            f" smallest, got {pieces}; set per_client or clients lower"
        )
    cut = [piece for pool in pools for piece in np.array_split(rng.permutation(pool), pieces)]
    order = rng.permutation(len(cut)).reshape(clients, per_client)
    return [np.concatenate([cut[piece] for piece in mine]) for mine in order]


def udd(y: Labels, clients: int, seed: int) -> Parts:
    """Unbalanced data distribution: client k of K holds ceil(k * classes / K) classes.

    SplitLPF, 4.1; ours (docs/methods/common.md): client k holds k classes, as this is for as many
    clients as classes. The classes are drawn; the clients of a class share it equally. Weakest
    first.
    """
    _check("udd", y, clients)
    rng, pools = _generator(Stream.PARTITION, seed), _classes(y)
    holds = np.zeros((clients, len(pools)), bool)
    for k in range(clients):
        many = -(-(k + 1) * len(pools) // clients)
        holds[k, rng.permutation(len(pools))[:many]] = True
    crowded = holds.sum(0).max()
    if crowded > (smallest := min(map(len, pools))):
        raise ConfigurationError(
            f"partition udd: expected at most {smallest} clients to share a class, the samples of"
            f" the smallest, got {crowded}; set clients lower"
        )
    counts = np.zeros(holds.shape, np.int64)
    for c, pool in enumerate(pools):
        holders = np.flatnonzero(holds[:, c])
        counts[holders, c] = [len(part) for part in np.array_split(pool, len(holders))]
    return _deal(rng, pools, counts)


def uds(y: Labels, clients: int, seed: int, *, smallest: int = 500) -> Parts:
    """Unbalanced data size: 500 / 1000 / 2000 / 4000 samples for 4 / 3 / 2 / 1 clients of ten.

    SplitLPF, 4.1. Other numbers of clients keep those shares, and `smallest` scales the sizes.
    Every client has the classes in the proportions of the whole. The remaining samples are left
    out. Weakest first.
    """
    _check("uds", y, clients)
    check_value("partition uds: smallest", smallest, whole(1))
    place = (np.arange(clients) + 0.5) / clients
    sizes = smallest * np.select([place < 0.4, place < 0.7, place < 0.9], [1, 2, 4], 8)
    if sizes.sum() > len(y):
        most = len(y) * smallest // int(sizes.sum())
        raise ConfigurationError(
            f"partition uds: expected at most {len(y)} samples in all, got {sizes.sum()};"
            f" set smallest = {most}" + ("" if most else ", or clients lower")
        )
    rng, rank = _generator(Stream.PARTITION, seed), np.empty(len(y))
    for pool in _classes(y):
        # rank within its own class, so that slices of this order have every class's share
        rank[rng.permutation(pool)] = (np.arange(len(pool)) + 0.5) / len(pool)
    order = np.argsort(rank, kind="stable")
    return np.split(order, np.cumsum(sizes))[:clients]


def udds(
    y: Labels, clients: int, seed: int, *, concentration: float = 0.5, least: int = LEAST
) -> Parts:
    """Unbalanced data distribution and size: `dirichlet` with 0.5. SplitLPF, 4.1."""
    return dirichlet(y, clients, seed, concentration=concentration, least=least)


def natural(groups: NDArray[Any] | None, clients: int) -> Parts:
    """One client for each person that the samples came from, in the order of their numbers."""
    if groups is None:
        raise ConfigurationError(
            "partition natural: expected data that names the person of each sample (uci-har, or"
            " group_* arrays in an .npz), got data that does not; choose another partition"
        )
    people = np.unique(groups)
    if clients != len(people):
        raise ConfigurationError(
            f"partition natural: expected clients = {len(people)}, one for each person in the"
            f" data, got {clients}"
        )
    return [np.flatnonzero(groups == person) for person in people]


RULES: Final[dict[str, Callable[..., Parts]]] = {
    "iid": iid,
    "shards": shards,
    "dirichlet": dirichlet,
    "dirichlet-client": dirichlet_client,
    "dirichlet-equal": dirichlet_equal,
    "quantity": quantity,
    "udd": udd,
    "uds": uds,
    "udds": udds,
}


def label_distribution(y: Labels, parts: Sequence[Indices], classes: int) -> NDArray[np.float64]:
    """P_k of every client: (clients, classes), rows sum to 1; a client without samples has zeros.

    Raises: ConfigurationError if a label is not below `classes`.
    """
    if y.size and y.max() >= classes:
        raise ConfigurationError(f"labels: expected all below {classes} classes, got {y.max()}")
    counts = np.stack([np.bincount(y[part], minlength=classes) for part in parts])
    sums: NDArray[np.int64] = counts.sum(1, keepdims=True)
    return counts / np.maximum(sums, 1)


@dataclass(frozen=True, slots=True)
class RhoTest:
    """A client's test samples.

    Attributes:
        id, ood: indices in and out of its distribution.
        weights: (#id,) of the samples in `id`, with mean 1; None where they count alike.
    """

    id: Indices
    ood: Indices
    weights: NDArray[np.float64] | None = None


def rho_tests(
    y_train: Labels, parts: Sequence[Indices], y_test: Labels, rho: float, seed: int
) -> list[RhoTest]:
    """Test samples of each client, some of them of classes that it does not train on.

    ID = all test samples of the client's classes; OOD = round(rho * #ID) drawn from the other
    classes, each at most once. HARMONY, Eq. 11: rho = #OOD / #ID; 0 tests on ID alone.

    Args:
        y_train, parts: a client's classes are those in y_train[part].
        y_test: (m,) labels of the common test set.
    Raises: ConfigurationError naming a client whose other classes have too few samples.
    """
    check_value("rho", rho, number(least=0))
    tests = []
    for client, part in enumerate(parts):
        known = np.isin(y_test, np.unique(y_train[part]))
        inside, outside = np.flatnonzero(known), np.flatnonzero(~known)
        wanted = round(rho * len(inside))
        if wanted > len(outside):
            raise ConfigurationError(
                f"rho: client {client}: expected {wanted} test samples of classes it does not"
                f" train on, got {len(outside)}; set rho at most {len(outside) / len(inside):.3g},"
                " or choose a partition that leaves it fewer classes"
            )
        chosen = _generator(Stream.UNSEEN_CLASSES, seed, index=client).choice(
            outside, wanted, replace=False
        )
        tests.append(RhoTest(inside, np.sort(chosen)))
    return tests


def own_mix(y_train: Labels, y_test: Labels) -> NDArray[np.float64]:
    """Weights that give test samples the class shares of a client's own: (n,), with mean 1.

    w_i = n * P_k(y_i) / #{j: y_j = y_i}    (SplitLPF tests on a client's own distribution; ours)

    A weighted share of right answers is then sum_c P_k(c) * accuracy_c, without any draw. Classes
    without test samples are left out of P_k.

    Args:
        y_train: the client's labels. y_test: (n,) labels of test samples of its classes.
    """
    if not len(y_test):
        return np.ones(0)
    tested = np.bincount(y_test)
    own = np.bincount(y_train, minlength=len(tested))[: len(tested)] * (tested > 0)
    share = own / own.sum()
    weights: NDArray[np.float64] = (len(y_test) * share / np.maximum(tested, 1))[y_test]
    return weights


@dataclass(frozen=True, slots=True)
class LocalSplit:
    """A client's own samples: indices to train, validate and test on, and its drifted extra.

    Attributes:
        drift: as many as `test`, drawn with replacement from the other clients' test samples.
    """

    train: Indices
    validation: Indices
    test: Indices
    drift: Indices


def local_splits(
    parts: Sequence[Indices], seed: int, *, validation: float = 0.2, test: float = 0.2
) -> list[LocalSplit]:
    """Each client's own 60 / 20 / 20, and other clients' test samples as drift.

    HARMONY, Table 5: train and test sets merged (`Dataset.merged`), dealt out by
    `dirichlet_equal`, split client by client; *with drift* a client is tested on `test` and
    `drift` together.

    Raises: ConfigurationError if shares or parts leave nothing to train, validate or test on.
    """
    if min(validation, test) <= 0 or validation + test >= 1:
        raise ConfigurationError(
            f"local split: expected shares above 0 that leave some to train on, got {validation}"
            f" to validate and {test} to test"
        )
    pieces = []
    for client, part in enumerate(parts):
        held, tested = round(validation * len(part)), round(test * len(part))
        if min(held, tested, len(part) - held - tested) < 1:
            raise ConfigurationError(
                f"local split: client {client}: expected a sample to train, validate and test on,"
                f" got {len(part)} in all; set clients lower"
            )
        order = _generator(Stream.LOCAL_SPLIT, seed, index=client).permutation(part)
        pieces.append(np.split(order, [len(part) - held - tested, len(part) - tested]))
    splits = []
    for client, (train, held_out, own) in enumerate(pieces):
        others = [piece[2] for k, piece in enumerate(pieces) if k != client]
        if not others:
            raise ConfigurationError("local split: expected other clients to drift to, got one")
        drift = _generator(Stream.DRIFT, seed, index=client).choice(
            np.concatenate(others), len(own)
        )
        splits.append(LocalSplit(train, held_out, own, drift))
    return splits


def _by_shares(
    rule: str,
    pools: Sequence[Indices],
    *,
    clients: int,
    seed: int,
    least: int,
    draw: Callable[[np.random.Generator], NDArray[np.float64]],
) -> Parts:
    """Split each class by shares, (clients, classes) with columns that sum to 1."""
    check_value(f"partition {rule}: least", least, whole(0))
    samples = sum(map(len, pools))
    if clients * least > samples:
        raise ConfigurationError(
            f"partition {rule}: expected at least {clients * least} samples, {least} a client,"
            f" got {samples}; set clients or least lower"
        )
    rng, sizes = _generator(Stream.PARTITION, seed), np.array([len(pool) for pool in pools])
    for _ in range(REDRAWS):
        ends = np.rint(np.cumsum(draw(rng), 0) * sizes).astype(np.int64)
        ends[-1] = sizes  # floats may sum to a little less than 1
        counts = np.diff(ends, axis=0, prepend=0)
        if counts.sum(1).min() >= least:
            return _deal(rng, pools, counts)
    raise ConfigurationError(
        f"partition {rule}: expected every client to get {least} samples within {REDRAWS} draws,"
        " got none that does; set concentration higher, or clients or least lower"
    )


def _deal(rng: np.random.Generator, pools: Sequence[Indices], counts: NDArray[np.int64]) -> Parts:
    """Deal every class out at random, `counts` (clients, classes) of it."""
    # the piece after the last client's is left out
    piles = [
        np.split(rng.permutation(pool), np.cumsum(counts[:, c]))[:-1]
        for c, pool in enumerate(pools)
    ]
    return [np.concatenate([pile[client] for pile in piles]) for client in range(len(counts))]


def _open(wish: NDArray[np.float64], left: NDArray[np.int64]) -> NDArray[np.float64]:
    """`wish` among the classes that have samples left; if it has none of them, what is left."""
    masked = np.where(left > 0, wish, 0.0)
    shares: NDArray[np.float64] = masked if masked.sum() > 0 else left.astype(np.float64)
    shares /= shares.sum()
    return shares


def _classes(y: Labels) -> list[Indices]:
    """The samples of each class."""
    return [np.flatnonzero(y == label) for label in np.unique(y)]


def _generator(stream: Stream, seed: int, **words: int) -> np.random.Generator:
    check_value("seed", seed, whole(0))
    return stream.generator(seed, **words)


def _check(rule: str, y: Labels, clients: int) -> None:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ConfigurationError(
            f"partition {rule}: expected a row of whole labels, got {y.dtype} of shape {y.shape}"
        )
    check_value(f"partition {rule}: clients", clients, whole(1))
    if clients > len(y):
        raise ConfigurationError(
            f"partition {rule}: expected at most {len(y)} clients, one a sample, got {clients}"
        )
