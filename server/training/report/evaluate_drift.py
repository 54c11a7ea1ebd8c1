"""What HARMONY's Table 5 is judged by: clients whose data drift to those of others (Out-of-Client).

    without drift    each client on its own test samples
    with drift       on these and as many again of the other clients', drawn with replacement

Both are means over clients, each with the gate that is best for what it is tested on, as the
paper's oracle chooses. docs/methods.md.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

from server.training.report.evaluate import Evaluator
from server.training.run.run import Simulation

# drift, as a share of a client's own test samples
_SIDES: Final = {"without_drift": 0.0, "with_drift": 1.0}


def drift_report(run: Simulation, *, supervised: bool) -> dict[str, Any] | None:
    """Accuracy with and without drift, whatever the recipe's own `rho` is.

    Args:
        supervised: whether the server ever answered features (`Evaluator.answers`).
    Returns: None where all clients are tested on samples of one common test set: nobody else's
        data are apart there (`split = "local"` deals them out).
    """
    if not run.tests:
        return None
    each = {}
    for word, rho in _SIDES.items():
        scores = Evaluator(run, rho).clients(supervised=supervised)
        each[word] = {c.client: (c.inside + c.outside).accuracy for c in scores}
    return {word: statistics.fmean(found.values()) for word, found in each.items()} | {
        "each": {
            client: {word: found[client] for word, found in each.items()} for client in run.tests
        }
    }
