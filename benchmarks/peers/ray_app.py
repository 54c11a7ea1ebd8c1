"""Ray Serve with the same graph, as its documents show it: one replica behind its HTTP proxy.

    python -P -m benchmarks.peers.ray_app GRAPH PORT

It runs in an environment of its own, where nothing of splitedge is installed.
"""

import signal
import sys

import numpy as np
import onnxruntime
import orjson
import ray
from fastapi import Request, Response
from ray import serve

PATH = "/infer"


class Digits:
    """One replica with one session."""

    def __init__(self, graph: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )

    async def __call__(self, request: Request) -> Response:
        """The answer to a request."""
        described = orjson.loads(await request.body())["inputs"][0]
        x = np.array(described["data"], np.float32).reshape(described["shape"])
        logits = self.session.run(["logits"], {"x": x})[0]
        output = {"name": "logits", "datatype": "FP32", "shape": logits.shape}
        answer = {"outputs": [{**output, "data": logits.ravel().tolist()}]}
        return Response(orjson.dumps(answer), media_type="application/json")


def main(graph: str, port: str) -> None:
    """Serve until a signal."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(port)},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    deployment = serve.deployment(num_replicas=1, max_ongoing_requests=100)(Digits)
    serve.run(deployment.bind(graph), route_prefix=PATH)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(*sys.argv[1:])
