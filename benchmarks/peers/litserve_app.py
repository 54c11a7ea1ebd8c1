"""LitServe with the same graph, as its documents show it.

    python -P -m benchmarks.peers.litserve_app GRAPH PORT

It runs in an environment of its own, where nothing of splitedge is installed.
"""

import sys
from typing import Any

import litserve
import numpy as np
import onnxruntime
from fastapi import Request

PATH = "/predict"


class DigitsApi(litserve.LitAPI):  # type: ignore[misc]  # litserve is not installed where mypy runs
    """One worker process with one session."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe's signature
        """Load the graph."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            sys.argv[1], options, providers=["CPUExecutionProvider"]
        )

    def decode_request(self, request: Request) -> Any:
        """The tensor of a request; by this annotation LitServe passes the body's JSON as it is."""
        fields: Any = request
        described = fields["inputs"][0]
        return np.array(described["data"], np.float32).reshape(described["shape"])

    def predict(self, x: Any) -> Any:
        """Run the graph."""
        return self.session.run(["logits"], {"x": x})[0]

    def encode_response(self, output: Any) -> dict[str, Any]:
        """The answer."""
        described = {"name": "logits", "datatype": "FP32", "shape": list(output.shape)}
        return {"outputs": [{**described, "data": output.ravel().tolist()}]}


if __name__ == "__main__":
    server = litserve.LitServer(DigitsApi(), accelerator="cpu")
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )
