"""The engine behind many concurrent callers: one thread steps it, coroutines await its outputs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from mlserve.engine.engine import Engine
from mlserve.engine.media import GivenImage
from mlserve.errors import MlserveError, StepError
from mlserve.request import RequestOptions, SamplingParams, StreamOutput

__all__ = ["AsyncEngine"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULTS = RequestOptions()


@dataclass(frozen=True, slots=True, eq=False)
class _Listener:
    """Where one request's outputs go: a queue that belongs to its caller's event loop."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[StreamOutput | Exception]

    def send(self, item: StreamOutput | Exception) -> bool:
        """Returns whether anybody can hear it."""
        return _call_in(self.loop, self.outputs.put_nowait, item)


_Parcel = list[tuple[asyncio.Queue[StreamOutput | Exception], StreamOutput]]  # a step's outputs for one event loop


class AsyncEngine:
    """Runs an `Engine` in a thread of its own. Everything that touches the engine happens there, in order.

    Use as a context manager, or call `close()`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        self._lock = threading.Lock()  # so that no command that somebody waits for is put after the last one
        self._closed = False
        self._closing = False  # the same, as the engine's thread knows it
        self._thread = threading.Thread(target=self._run, name="mlserve-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs, and end the thread. Whoever waits for outputs gets an `MlserveError`."""
        with self._lock:
            self._closed = True
            self._commands.put(self._stop)
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether requests are served: it wasn't closed, and its thread lives."""
        return not self._closed and self._thread.is_alive()

    async def stream(
        self,
        request_id: str,
        prompt: str | Seq[int],
        params: SamplingParams,
        options: RequestOptions = _DEFAULTS,
        images: Seq[GivenImage] = (),
    ) -> AsyncGenerator[StreamOutput]:
        """Outputs of one request as they come. Leaving the loop early, or cancelling, aborts the request.

        images: as `ImageDesk.identify` gives them; call that in a thread of its own, since decoding takes time.

        Raises a `RequestError` before the first output if the request can't be served, `StepError` if the engine fails,
        and `MlserveError` if it is closed.
        """
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())

        def add() -> None:
            try:
                engine = self._engine
                engine.submit(engine.prepare(request_id, prompt, params, options, images))
            except Exception as error:
                listener.send(error)
                return
            self._listeners[request_id] = listener

        self._enqueue(add)
        done = False
        try:
            while not done:
                item = await listener.outputs.get()
                done = isinstance(item, Exception) or item.completed is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not done:
                self._commands.put(lambda: self._abort(request_id, listener))

    async def call(self, action: Callable[[Engine], T]) -> T:
        """Run `action(engine)` between two steps, in the engine's thread, and return what it returns.

        Raises what it raises, and `MlserveError` if the engine is closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = action(self._engine)
            except Exception as error:
                _call_in(loop, _fail, future, error)
            else:
                _call_in(loop, _fulfil, future, value)

        self._enqueue(run)
        return await future

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise MlserveError("the engine is closed: make a new one")
            self._commands.put(command)

    def _run(self) -> None:
        while not self._closing:
            self._take_commands(wait=not self._engine.has_work())
            if self._closing or not self._engine.has_work():
                continue
            try:
                outputs = self._engine.step()
            except Exception as error:  # a defect of ours: fail what is live rather than leave callers hanging
                logger.exception("the engine's step raised outside the model")
                self._fail_all(error)
                continue
            self._deliver(outputs)
        self._fail_all(MlserveError("the engine was closed: requests that ran were aborted"))

    def _take_commands(self, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _deliver(self, outputs: Seq[StreamOutput]) -> None:
        """A step's outputs, in one call for each event loop: waking a loop costs more than all that it is told."""
        parcels: dict[asyncio.AbstractEventLoop, _Parcel] = {}
        for output in outputs:
            last = output.completed is not None
            listener = self._listeners.pop(output.request_id, None) if last else self._listeners.get(output.request_id)
            if listener is not None:
                parcels.setdefault(listener.loop, []).append((listener.outputs, output))
        for loop, parcel in parcels.items():
            if not _call_in(loop, _unpack, parcel):
                self._abandon(loop)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """An event loop was closed: nobody waits for its requests any more."""
        for request_id, listener in list(self._listeners.items()):
            if listener.loop is loop:
                self._abort(request_id, listener)

    def _abort(self, request_id: str, listener: _Listener) -> None:
        if self._listeners.get(request_id) is listener:
            del self._listeners[request_id]
            self._engine.abort(request_id)

    def _fail_all(self, error: Exception) -> None:
        for request_id, listener in list(self._listeners.items()):
            self._engine.abort(request_id)
            listener.send(error if isinstance(error, MlserveError) else StepError(f"the engine failed: {error}"))
        self._listeners.clear()

    def _stop(self) -> None:
        self._closing = True


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> bool:
    """Have a loop of another thread call it. Returns whether it will: loops may be closed at any time."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


def _unpack(parcel: _Parcel) -> None:
    for queue_, output in parcel:
        queue_.put_nowait(output)


def _fulfil(future: asyncio.Future[T], value: T) -> None:
    if not future.cancelled():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.cancelled():
        future.set_exception(error)
