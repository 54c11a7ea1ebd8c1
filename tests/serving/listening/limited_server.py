"""An HTTP server that may open few descriptors: `limited_server.py LIMIT TICK_S [CERT KEY]`.

It prints its URL, and ends when its standard input does.
"""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path

from fastapi import FastAPI

from edge_sdk.service.listening import listen
from edge_sdk.wire.address import Address
from server.http_server import HttpServer

limit, tick_s = int(sys.argv[1]), float(sys.argv[2])
files = [Path(each) for each in sys.argv[3:]]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 1024), limit))
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
app = FastAPI()


@app.get("/live")
async def live() -> dict[str, bool]:
    """An answer that takes no time."""
    return {"live": True}


with HttpServer(app, listen(Address("127.0.0.1", 0)), *files, tick_s=tick_s) as server:
    print(server.url, flush=True)
    sys.stdin.read()
