"""A TCP proxy between a role and a server, that can be cut, silent or slow, as a network can."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

from tests.support.ports import free_port


class Proxy:
    """Listens on `port` and passes bytes on to a loopback port, in a thread of its own. A context manager."""

    def __init__(self, target: int, delay_s: float = 0.0) -> None:
        self.port = free_port()
        self._target = target
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._open: asyncio.Event
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"proxy to {target}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def cut(self) -> None:
        """Packets vanish: connections stay and nothing passes, in either direction; new ones hang."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """What waited passes, as TCP sends again what was not acknowledged."""
        self._loop.call_soon_threadsafe(self._open.set)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(self._listen())
        self._up.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        self._open = asyncio.Event()
        self._open.set()
        return await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled at the end; asyncio's own callback would print that as an error.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes from one side to the other, each `delay_s` after it came."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        sender = self._loop.create_task(self._send(queue, writer))
        try:
            while True:
                data = await reader.read(1 << 16)
                await queue.put((self._loop.time() + self._delay_s, data))
                if not data:
                    break
            await sender
        except OSError:
            sender.cancel()
            writer.close()

    async def _send(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = await queue.get()
                await asyncio.sleep(due - self._loop.time())
                await self._open.wait()
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.close()
