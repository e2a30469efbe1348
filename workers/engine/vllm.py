"""The real engine: one `AsyncLLM`, and vLLM's own OpenAI application called in process.

Every endpoint, parser, structured-output mode and error body is therefore vLLM's own. Written for the module layout of
vLLM 0.32; `import_problem` says in one line what does not fit.

Everything runs on the loop of the thread that calls `start`, and that thread must live as long as the engine: the
engine's processes are bound to it (see `parent_death`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from common import logs
from common.errors import BatchmillError, UsageError
from common.registry import ModelVersion
from common.settings import Settings
from common.urls import URL_CODE
from workers.engine import aborts, arguments, cpu_threads, parent_death, privacy, sockets
from workers.engine.asgi import Caller, Response
from workers.engine.base import Answer, EngineDead, EngineFacts, EngineStats
from workers.models.verify import settle
from workers.preflight import checks

log = logs.get(__name__)

#: Seconds the engine's processes get to end by themselves in `stop`; they are killed after.
STOP_S = 10.0

#: Seconds an engine that aborted a request by itself is given to say that it is alive.
DOUBT_S = 60.0

_DEAD = "the engine process ended"


class VllmEngine:
    """An engine for one model version; see `workers.engine.base.Engine`."""

    def __init__(self, model_version: str, entry: ModelVersion, settings: Settings) -> None:
        self.model_version = model_version
        self._entry = entry
        self._settings = settings
        self._llm: Any = None
        self._caller: Caller | None = None
        self._paths: frozenset[str] = frozenset()
        self._tasks: tuple[str, ...] = ()
        self._processes: list[Any] = []
        self._gauges = EngineStats()
        self._doubt: asyncio.Future[bool] | None = None
        self._sockets: sockets.SocketFolder | None = None
        self._facts: EngineFacts | None = None

    async def start(self) -> None:
        """Load the model; `UsageError` when model, arguments or vLLM do not fit, `BatchmillError` when it fails."""
        started = time.monotonic()
        set_environment(self._settings)
        model = settle(self.model_version, self._entry, self._settings)
        checks.before_start(self.model_version, self._entry, self._settings)
        parent_death.own_engine()
        self._sockets = sockets.SocketFolder.make()
        problem = import_problem()
        if problem is not None:
            raise UsageError(problem)
        try:
            await self._build(model.folder)
        except BatchmillError:
            await self.stop()
            raise
        except Exception as exc:
            await self.stop()
            raise _start_error(self.model_version, exc) from exc
        self._facts = self._describe(model.digest, time.monotonic() - started)
        log.info("engine is ready", model=self.model_version, seconds=round(time.monotonic() - started, 1))

    async def infer(self, url: str, body: bytes) -> Answer:
        """Answer one request; see `Engine.infer`. What the model cannot do is a 400 that says so."""
        caller = self._caller
        if caller is None:
            raise EngineDead("the engine is not started")
        if url not in self._paths:
            return self._unsupported(url)
        if self._doubt is not None:
            await self._settle_doubt()
        try:
            with aborts.watching() as watch:
                response = await caller.post(url, self._complete(url, body))
        except Exception as exc:
            # The application answers its own errors; what still comes out is a fault of its or of the engine's.
            await self.check()
            log.warning("the engine's application failed", url=url, error=type(exc).__name__)
            return _error(500, "internal_error", f"the engine's application failed: {type(exc).__name__}")
        if watch.aborted:
            # A cut answer, whatever it says of itself. Mostly the engine's process was told to end: then it is dead
            # in a moment, and what is sent to it until then would only be aborted in its turn.
            await self._settle_doubt()
            return _error(503, "aborted", "the engine aborted the request")
        return await self._judge(url, response)

    def _complete(self, url: str, body: bytes) -> bytes:
        """The body with a model where the endpoint insists on one and the request left it to the batch."""
        if url != "/v1/messages" or b'"model"' in body[:64]:
            return body
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return body
        if "model" in fields:
            return body
        return msgspec.json.encode({"model": self.model_version} | fields)

    async def _judge(self, url: str, response: Response) -> Answer:
        if response.status >= 500:
            await self.check()
            if response.status == 501:
                # A route that is there for every model, asked of a model that cannot: as final as any other 4xx.
                return self._unsupported(url, _message(response.body))
        if response.content_type != "application/json":
            return _error(
                400,
                "unsupported",
                f"the answer of {url} would be '{response.content_type}', a result line holds JSON: ask without "
                "`stream` and with encoding_format float or base64",
            )
        body = response.body
        if b"\n" in body or b"\r" in body:
            # In JSON a raw line break can only stand between tokens.
            body = body.replace(b"\r", b" ").replace(b"\n", b" ")
        return Answer(response.status, body)

    async def check(self) -> None:
        """`EngineDead` when the engine is not alive."""
        llm = self._llm
        if llm is None or llm.errored:
            raise EngineDead(_DEAD)
        # A process that was told to end (SIGTERM) aborts its requests and exits; vLLM notices a moment later.
        for process in self._processes:
            if process.exitcode is not None:
                raise EngineDead(_DEAD)

    async def _settle_doubt(self) -> None:
        """`EngineDead` when the engine is ending; all requests wait for one look."""
        if self._doubt is None:
            self._doubt = asyncio.ensure_future(self._dies())
        doubt = self._doubt
        # Shielded: the request that waits may be cancelled, the look goes on for the others.
        if await asyncio.shield(doubt):
            raise EngineDead(_DEAD)
        if self._doubt is doubt:
            self._doubt = None

    async def _dies(self) -> bool:
        """A question that an engine answers between two steps; one that is ending refuses it or says nothing."""
        probe = asyncio.ensure_future(self._llm.is_sleeping())
        try:
            deadline = time.monotonic() + DOUBT_S
            while time.monotonic() < deadline:
                await self.check()
                await asyncio.wait((probe,), timeout=0.05)
                if probe.done():
                    return probe.exception() is not None
        except EngineDead:
            return True
        finally:
            probe.cancel()
        return True

    def facts(self) -> EngineFacts:
        """Known once `start` returned."""
        if self._facts is None:
            raise RuntimeError("the engine is not started")
        return self._facts

    def stats(self) -> EngineStats:
        """The scheduler's numbers of its last step."""
        llm = self._llm
        if llm is not None and not llm.output_processor.has_unfinished_requests():
            # The scheduler says nothing when it goes idle, so its last numbers would stand.
            return EngineStats(kv_usage=self._gauges.kv_usage, preempted=self._gauges.preempted)
        return self._gauges

    async def stop(self) -> None:
        """End the engine and its processes, within `STOP_S` and a moment."""
        caller, self._caller = self._caller, None
        llm, self._llm = self._llm, None
        if caller is not None:
            await caller.close()
        if llm is not None:
            # It joins processes; in a thread, so that this loop goes on serving what waits on it.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.to_thread(llm.shutdown, STOP_S), STOP_S + 5)
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
                await asyncio.to_thread(process.join, 2)
        self._processes = []
        gc.unfreeze()
        if self._doubt is not None:
            self._doubt.cancel()
        if self._sockets is not None:
            self._sockets.remove()
            self._sockets = None

    async def _build(self, folder: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.v1.engine.async_llm import AsyncLLM

        if current_platform.is_cpu():
            cores = cpu_threads.allowed_cores()
            if cpu_threads.use_all_cores(os.environ, cores):
                log.info("all cores compute; VLLM_CPU_OMP_THREADS_BIND=auto leaves one of them free", cores=cores)
        values = arguments.engine_values(
            self.model_version, self._entry, self._settings, folder, cpu=current_platform.is_cpu()
        )
        args = arguments.parse(self.model_version, values)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        propagate_flash_late_interaction(args, engine_args)
        # LLM_CLASS: the scheduler's defaults for throughput; any unknown context gets small ones.
        context = UsageContext.LLM_CLASS
        try:
            config = engine_args.create_engine_config(usage_context=context)
        except (ValueError, TypeError, NotImplementedError) as exc:
            raise UsageError(f"model {self.model_version}: vLLM refuses it: {one_line(exc)}") from exc
        # What `build_async_engine_client` does, with our gauges beside vLLM's own.
        self._llm = AsyncLLM.from_vllm_config(
            vllm_config=config,
            usage_context=context,
            stat_loggers=[self._gauge_logger()],
            enable_log_requests=False,
            disable_log_stats=engine_args.disable_log_stats,
        )
        aborts.observe(self._llm)
        privacy.guard_logs()
        manager = getattr(self._llm.engine_core.resources, "engine_manager", None)
        self._processes = list(getattr(manager, "processes", ()))
        await self._llm.reset_mm_cache()
        self._tasks = tuple(await self._llm.get_supported_tasks())
        app = build_app(args, self._tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, args, self._tasks)
        # The error handler tells its HTTP server to end when the engine is dead; here the worker asks `check`.
        app.state.server = _NoServer()
        self._paths = frozenset(
            route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())
        ) & frozenset(URL_CODE)
        self._caller = Caller(app)
        # As vLLM's server does once it is up: what is there now stays, and need not be looked at by every collection.
        freeze_gc_heap()

    def _gauge_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class Gauges(StatLoggerBase):  # type: ignore[misc]  # vLLM is not typed here
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
                    engine._gauges = EngineStats(
                        running=scheduler_stats.num_running_reqs,
                        waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                        kv_usage=scheduler_stats.kv_cache_usage,
                        preempted=engine._gauges.preempted + preempted,
                    )

            def log_engine_initialized(self) -> None:
                pass

        return Gauges

    def _describe(self, digest: str, seconds: float) -> EngineFacts:
        from vllm.platforms import current_platform
        from vllm.version import __version__ as vllm_version

        config = self._llm.vllm_config
        parallel = config.parallel_config.tensor_parallel_size
        if current_platform.is_cpu():
            device = "cpu"
        else:
            ids = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(i) for i in range(parallel))
            device = f"gpu {ids} ({current_platform.get_device_name()})"
        blocks = config.cache_config.num_gpu_blocks or 0
        return EngineFacts(
            engine=f"vllm {vllm_version}",
            model=self.model_version,
            device=device,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            detail={
                "digest": digest,
                "dtype": str(config.model_config.dtype).removeprefix("torch."),
                "tensor_parallel": parallel,
                "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "kv_cache_tokens": blocks * (config.cache_config.block_size or 0),
                "tasks": ",".join(self._tasks),
                "start_s": round(seconds, 1),
            },
        )

    def _unsupported(self, url: str, why: str = "") -> Answer:
        if url not in URL_CODE:
            return _error(404, "not_found", f"there is no endpoint {url}")
        does = ", ".join(sorted(self._paths)) or "none of the endpoints"
        detail = f"; {why}" if why else ""
        return _error(
            400,
            "unsupported",
            f"model {self.model_version} cannot serve {url}: its tasks are {', '.join(self._tasks)}{detail}; it "
            f"serves {does}",
        )


class _NoServer:
    """Stands where vLLM's application expects its HTTP server."""

    should_exit = False


def set_environment(settings: Settings) -> None:
    """What must be set before vLLM is imported; a variable that is set already stays."""
    log_level = settings.telemetry.log_level.upper()
    for name, value in {
        # Everything is on this machine; a hub that does not answer must not delay or change a start.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # vLLM's debug level prints requests.
        "VLLM_LOGGING_LEVEL": "INFO" if log_level == "DEBUG" else log_level,
        # One request with n=10000 would keep everybody else waiting for minutes; 128 is what OpenAI takes.
        "VLLM_MAX_N_SEQUENCES": "128",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    if settings.inference.device_ids:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str(i) for i in settings.inference.device_ids))


def import_problem() -> str | None:
    """Import what the engine uses of vLLM; None, or in one line what does not fit and what to do."""
    try:
        import vllm.entrypoints.launchers.api_server.app_state
        import vllm.entrypoints.launchers.app
        import vllm.entrypoints.launchers.cli_args
        import vllm.v1.engine.async_llm  # noqa: F401
    except ModuleNotFoundError as exc:
        if exc.name == "vllm":
            return "vLLM is not installed; install batchmill[gpu], or batchmill[cpu] where there is no GPU"
        if exc.name is not None and exc.name.startswith("vllm."):
            return f"this vLLM has no {exc.name}: batchmill is made for vLLM 0.32; install that version"
        return f"vLLM cannot be imported: {exc.name} is missing; reinstall batchmill[gpu] or batchmill[cpu]"
    except Exception as exc:
        text = one_line(exc)
        if "torchvision" in text:
            return (
                f"vLLM cannot be imported: {text}; the installed torchvision does not fit this torch: "
                "pip uninstall torchvision torchaudio torchcodec (vLLM runs without them)"
            )
        return f"vLLM cannot be imported: {text}"
    return None


def _start_error(model_version: str, exc: Exception) -> BatchmillError:
    return BatchmillError(
        f"model {model_version}: the engine did not start: {one_line(exc)}; the lines of the engine's own log above "
        "this one say why"
    )


def one_line(exc: BaseException) -> str:
    """An exception's text on one line, cut to a length that a terminal shows."""
    text = " ".join(str(exc).split()) or type(exc).__name__
    return text if len(text) <= 400 else text[:397] + "…"


def _error(status: int, kind: str, message: str) -> Answer:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return Answer(status, msgspec.json.encode(body))


def _message(body: bytes) -> str:
    """The message of an error body of vLLM's; empty when there is none."""
    try:
        found = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""
