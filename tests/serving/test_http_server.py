"""The end of an HTTP server."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
import urllib3
from fastapi import FastAPI

from edge_sdk.service.listening import listen
from edge_sdk.wire.address import Address
from server.http_server import HttpServer


@pytest.mark.deadline
def test_long_poll_that_is_cut_off_at_the_end_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, asked, ends = FastAPI(), threading.Event(), []

    @app.get("/poll")
    async def poll() -> None:
        asked.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cut off")
            raise

    def device(url: str) -> None:
        try:
            answer = urllib3.request("GET", f"{url}/poll", retries=False, timeout=20)
            ends.append(str(answer.status))
        except urllib3.exceptions.HTTPError as err:
            ends.append(type(err).__name__)

    caplog.set_level(logging.WARNING)
    with HttpServer(app, listen(Address("127.0.0.1", 0))) as server:
        asking = threading.Thread(target=device, args=(server.url,))
        asking.start()
        assert asked.wait(10)
    asking.join(20)
    assert ends[0] == "cut off"
    assert len(ends) == 2  # the device was told, one way or another
    assert not caplog.records
