"""A TCP proxy with faults."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any


class FaultProxy:
    """A TCP proxy that can hold everything back, be slow, cut connections and refuse new ones.

    Attributes:
        bytes_up, bytes_down: passed on to the target and back.
    """

    def __init__(self, target: int) -> None:
        self.latency_s = 0.0
        self.bytes_up = self.bytes_down = 0
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = self._call(self._listen())

    def hole(self) -> None:
        """Accept all bytes and pass none on."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def lift(self) -> None:
        """Pass bytes on again, first those held back."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def reset(self) -> None:
        """Cut every connection with a TCP reset."""
        self._call(self._abort())

    def close(self) -> None:
        """Cut every connection and refuse new ones."""
        try:
            self._call(self._shut())
        finally:  # a running loop would keep pytest from ending
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        pumps = [self._pump(reader, back, up=True), self._pump(there, writer, up=False)]
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in ends:
            end.transport.abort()
        self._writers -= ends

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        while data := await reader.read(65536):
            self.bytes_up += len(data) if up else 0
            self.bytes_down += 0 if up else len(data)
            await asyncio.sleep(self.latency_s)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _abort(self) -> None:
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            if sock.fileno() >= 0:  # one side may have closed a moment ago
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _shut(self) -> None:
        self._server.close()
        self._flowing.set()
        await self._abort()
        await asyncio.sleep(0.05)
