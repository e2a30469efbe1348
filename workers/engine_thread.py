"""The one thread in which the engine lives: its event loop is started once and runs until the process ends.

One loop for the engine's whole life (a second one gives false death reports), in a thread that is never replaced (the
kernel's parent-death signal of the engine's children hangs on the thread that made them).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from common import logs
from workers.engine.base import Engine, EngineDead

T = TypeVar("T")

#: Seconds between checks of an engine that nobody asks anything.
WATCH_S = 2.0
#: Seconds that tasks have to take note that the loop ends.
LEAVE_S = 1.0

log = logs.get(__name__)


class EngineThread:
    """Builds the engine inside its thread and keeps watch over it.

    `on_death(reason)` is called on the engine's loop, once, when the engine is found dead or its loop breaks.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        on_death: Callable[[str], None],
        prepare: Callable[[Engine], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` is awaited once the engine runs and before it counts as ready."""
        self._make = make
        self._prepare = prepare
        self._on_death = on_death
        self._engine: Engine | None = None
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stopping = False
        self._died = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        #: When the loop last turned, by the monotonic clock; 0 until the engine is ready.
        self.turned_at = 0.0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The engine's loop; only after `start` was called."""
        if self._loop is None:
            raise RuntimeError("the engine's loop has not been started")
        return self._loop

    @property
    def engine(self) -> Engine:
        """The engine; only after `start` returned."""
        if self._engine is None:
            raise RuntimeError("the engine has not been started")
        return self._engine

    @property
    def ready(self) -> bool:
        """True once the engine can answer."""
        return self._ready.done() and self._engine is not None

    @property
    def dead(self) -> bool:
        """True once the engine was found dead."""
        return self._died

    def start(self, give_up: Callable[[], None] = lambda: None) -> None:
        """Build the engine and block until it is ready; raises what building it raised.

        `give_up` is called a few times a second and may raise to end the wait.
        """
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        while True:
            try:
                self._ready.result(timeout=0.2)
            except concurrent.futures.TimeoutError:
                if self._ready.done():
                    raise
                give_up()
            else:
                return

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the engine's loop soon; silently nothing when the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return

    def stop(self, timeout: float) -> bool:
        """Stop the engine and its processes; False when that took longer than `timeout` seconds."""
        if not self._thread.is_alive():
            return True
        self._stopping = True
        if self._engine is not None:
            try:
                self.submit(self._engine.stop()).result(timeout)
            except concurrent.futures.TimeoutError:
                return False
            except Exception as exc:
                log.warning("the engine did not stop cleanly", error=type(exc).__name__)
        self.call(self.loop.stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def report_death(self, reason: str) -> None:
        """Tell, once, that the engine is dead. On the engine's loop."""
        if not self._died and not self._stopping:
            self._died = True
            self._on_death(reason)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.create_task(self._live())
            self.loop.run_forever()
        except BaseException as exc:
            # SystemExit and KeyboardInterrupt pass through asyncio and end the loop: nothing can be answered any more.
            self._fail(exc)
        self._close_loop()

    def _close_loop(self) -> None:
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=LEAVE_S))
        self.loop.close()

    async def _live(self) -> None:
        try:
            engine = self._make()
            await engine.start()
            if self._prepare is not None:
                await self._ready_or_stopped(engine, self._prepare)
        except BaseException as exc:
            self._fail(exc)
            return
        self._engine = engine
        self._ready.set_result(None)
        while not self._stopping:
            self.turned_at = time.monotonic()
            await asyncio.sleep(WATCH_S)
            try:
                await engine.check()
            except EngineDead as exc:
                self.report_death(str(exc))
                return
            except Exception as exc:
                log.warning("the engine's health check failed", error=type(exc).__name__)

    async def _ready_or_stopped(self, engine: Engine, prepare: Callable[[Engine], Awaitable[None]]) -> None:
        try:
            await prepare(engine)
        except BaseException:
            # It is up and nobody will ever know it, so nobody else would stop it.
            await engine.stop()
            raise

    def _fail(self, exc: BaseException) -> None:
        if self._ready.done():
            self.report_death(f"its loop ended: {type(exc).__name__}")
        else:
            self._ready.set_exception(exc)
