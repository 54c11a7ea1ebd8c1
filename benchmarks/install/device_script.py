"""Script of the device in `benchmarks.install.arm64`, on either processor; it prints JSON.

python device_script.py STATE INPUTS.npy THRESHOLD: a line at each of the words predict, status
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

START = time.perf_counter()


def main() -> None:
    """Answer the words that come on standard input, each with one line."""
    import numpy as np  # noqa: PLC0415 - the time of the imports is part of the start

    from edge_sdk import AgentSettings, EdgeAgent  # noqa: PLC0415

    state, inputs = Path(sys.argv[1]), np.load(sys.argv[2])
    settings = AgentSettings(threshold=float(sys.argv[3]), deadline_s=20.0, report_change=0)
    with EdgeAgent.open(state, settings) as agent:
        agent.predict(inputs[0], local=True)
        start_s = time.perf_counter() - START
        for line in sys.stdin:
            if line.strip() == "predict":
                answer: Any = [_row(agent.predict(x)) for x in inputs]
            else:
                answer = {
                    "machine": platform.machine(),
                    "presence": agent.status().presence,
                    "start_s": start_s,
                    "resident_bytes": resident_bytes(),
                }
            print(json.dumps(answer), flush=True)


def resident_bytes() -> int:
    """Resident memory of this process; under emulation with the emulator's own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def _row(prediction: Any) -> dict[str, Any]:
    return {
        "label": prediction.label,
        "source": prediction.source,
        "probabilities": prediction.probabilities.tolist(),
        "uncertainty": prediction.uncertainty,
        "latency_ms": prediction.latency_ms,
    }


if __name__ == "__main__":
    main()
