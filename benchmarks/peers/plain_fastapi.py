"""The least that answers the request with FastAPI: onnxruntime inline, no checks, no pydantic.

    python -P -m benchmarks.peers.plain_fastapi GRAPH PORT LOOP HTTP

LOOP and HTTP are uvicorn's words: `uvloop` and `httptools` are what `uvicorn[standard]` installs,
`asyncio` and `h11` what uvicorn alone has. It runs where nothing of splitedge is installed.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

PATH = "/infer"


def make_app(graph: str) -> FastAPI:
    """The application over a graph from `x` to `logits`."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    app = FastAPI()

    @app.post(PATH)
    async def infer(request: Request) -> Response:
        described = orjson.loads(await request.body())["inputs"][0]
        x = np.array(described["data"], np.float32).reshape(described["shape"])
        logits = session.run(["logits"], {"x": x})[0]
        output = {"name": "logits", "datatype": "FP32", "shape": logits.shape}
        answer = {"outputs": [{**output, "data": logits.ravel().tolist()}]}
        return Response(orjson.dumps(answer), media_type="application/json")

    return app


def main(graph: str, port: str, loop: str, http: str) -> None:
    """Serve until a signal."""
    app = make_app(graph)
    uvicorn.run(app, port=int(port), loop=loop, http=http, log_level="warning", access_log=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
