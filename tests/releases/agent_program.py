"""An agent as a program of its own, driven over stdin and stdout: one JSON object a line.

It uses the public names that both releases have, and is run with either of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from edge_sdk import AgentSettings, EdgeAgent, Prediction


def shown(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON."""
    return asdict(prediction) | {"probabilities": prediction.probabilities.tolist()}


def main() -> None:
    """Answer one call a line: `predict`, `late`, `acknowledge` or `status`."""
    state, samples = Path(sys.argv[1]), np.load(sys.argv[2])
    settings = AgentSettings(deadline_s=5.0, late_answers=True, heartbeat_s=0.5)
    with EdgeAgent.open(state, settings) as agent:
        for line in sys.stdin:
            call = json.loads(line)
            answer: Any
            if call["op"] == "predict":
                deadline = call.get("deadline_s")
                answers = agent.predict_many(samples[: call["samples"]], deadline_s=deadline)
                answer = [shown(one) for one in answers]
            elif call["op"] == "late":
                answer = [
                    {"id": late.id, "prediction": late.prediction and shown(late.prediction)}
                    for late in agent.late_answers()
                ]
            elif call["op"] == "acknowledge":
                answer = agent.acknowledge(call["id"])
            else:
                status = agent.status()
                answer = {"bundle": status.bundle, "presence": status.presence}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
