"""What the server can order beside requests: the fixed table of methods that a CALL may name, and the pause.

Runs on the loop's thread, between steps. A call may be answered later, once some steps have been made. While generation
is paused or the engine sleeps, new requests wait in its queue like others; the loop asks `has_step` before each step.
"""

import enum
import inspect
import json
import logging
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, get_args

from ringserve.engine.interface import AdapterStore, CallError, Engine, MemoryPart, RequestFailedError
from ringserve.engine.loop.link import EngineLink
from ringserve.engine.loop.stepper import Stepper
from ringserve.shm_transport.messages import AddRequest, Fork
from ringserve.shm_transport.request_ring import Call

logger = logging.getLogger(__name__)

_NOT_YET = object()
_POLL_S = 0.01  # how often an idle engine looks after the calls that wait
_WAIT_S = 0.5  # how often an idle engine looks whether its server still lives
_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)
_SCHEDULING = "scheduling"  # what sleeps at level 0
_TAGS = (*_PARTS, _SCHEDULING)


@dataclass(slots=True, frozen=True)
class Later:
    """An answer that may not be there yet: `attempt` returns _NOT_YET until it is, or raises."""

    attempt: Callable[[], Any]


@dataclass(slots=True, frozen=True)
class _Waiting:
    call_id: int | None  # None: nobody waits for an answer
    method: str
    attempt: Callable[[], Any]


class _State(enum.Enum):
    RUNNING = enum.auto()
    DRAINING = enum.auto()  # what is there runs to its end, what comes is held
    FROZEN = enum.auto()  # no step is made


class Control:
    """The engine's side of the control plane. The public methods below `call` are what a CALL may name."""

    def __init__(self, engine: Engine, link: EngineLink, stepper: Stepper) -> None:
        self._engine, self._link, self._stepper = engine, link, stepper
        self._state = _State.RUNNING
        self._num_resumes = 0
        self._held: list[AddRequest] = []  # came while draining
        self._asleep: set[str] = set()
        self._waiting: list[_Waiting] = []
        self._reader = ThreadPoolExecutor(1, "ringserve-adapters")
        self._methods: dict[str, Callable[..., Any]] = {
            "stats": engine.stats,
            "pause": self.pause,
            "resume": self.resume,
            "is_paused": lambda: self.is_paused,
            "reset_prefix_cache": self.reset_prefix_cache,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "is_sleeping": lambda: bool(self._asleep),
            "load_lora_adapter": self.load_lora_adapter,
            "unload_lora_adapter": self.unload_lora_adapter,
        }

    @property
    def has_step(self) -> bool:
        """Whether the loop is to make a step."""
        return self._state is not _State.FROZEN and self._engine.has_work

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait."""
        return self._state is not _State.RUNNING

    @property
    def wait_s(self) -> float:
        """How long the loop may wait for messages when there is no step to make."""
        return _POLL_S if self._waiting else _WAIT_S

    def add(self, request: AddRequest) -> None:
        """Hand a request to the engine, or hold it until the engine has drained."""
        if self._state is _State.DRAINING:
            self._held.append(request)
            return
        try:
            self._engine.add(request)
        except RequestFailedError as failure:
            self._link.send_failure(failure)

    def abort(self, handles: list[int]) -> None:
        """Drop requests wherever they are."""
        if self._held:
            gone = set(handles)
            self._held = [left for each in self._held if (left := _without(each, gone)) is not None]
        self._engine.abort(handles)
        self._link.note_aborted(len(handles))

    def call(self, call: Call) -> bool:
        """Carry out a CALL, or begin to; return whether it was the order to shut down."""
        try:
            order = json.loads(call.body)
            method = order["method"]
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            self._link.send_reply(call.call_id, {"error": f"the call cannot be read: {exc!r}", "fault": "invalid"})
            return False
        if method == "shutdown":
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._link.send_reply(call.call_id, {"result": True})
            return True
        waiting = _Waiting(call.call_id, method, lambda: self._begin(order))
        self._try(waiting)
        return False

    def retry(self) -> None:
        """Look after the pause and the calls that wait; after each step."""
        if self._state is _State.DRAINING and not self._engine.has_work:
            self._freeze()
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                self._try(each)

    def pause(self, mode: str = "wait", clear_cache: bool = True) -> Later:
        """Make no further steps; answers once that is so.

        Args:
            mode: "wait": what the engine has runs to its end first; "keep": it stays where it is. (The server makes
                "abort" of aborts and "wait".)
            clear_cache: Whether the prefix cache is reset; who is kept computes its keys and values again.
        """
        _check(mode in ("wait", "keep"), f"mode is {mode!r}: one of 'wait', 'keep'")
        _check(isinstance(clear_cache, bool), f"clear_cache is {clear_cache!r}: true or false")
        num_resumes = self._num_resumes
        if mode == "keep" and self._state is not _State.FROZEN:
            self._freeze()
        elif self._state is _State.RUNNING:
            self._state = _State.DRAINING

        def attempt() -> Any:
            if self._num_resumes != num_resumes:
                raise CallError("generation was resumed before it was paused", fault="conflict")
            if self._state is not _State.FROZEN:
                return _NOT_YET
            return self._engine.reset_prefix_cache(preempts=True) if clear_cache else True

        return Later(attempt)

    def resume(self) -> bool:
        """Go on."""
        _check(not self._asleep.intersection(_PARTS), "the engine is asleep: wake_up it first", "conflict")
        self._asleep.clear()
        self._state = _State.RUNNING
        self._num_resumes += 1
        self._add_held()
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the prefix cache; return False, and leave it, while requests hold blocks."""
        _check(isinstance(reset_running_requests, bool), "reset_running_requests must be true or false")
        if reset_running_requests:
            self._stepper.finish()
        return self._engine.reset_prefix_cache(preempts=reset_running_requests)

    def sleep(self, level: int = 1, mode: str = "wait") -> Later:
        """Pause, then free memory; answers with the level once that is done.

        Args:
            level: 0 frees nothing; 1 and 2 free the weights and the KV cache. Waking up loads the weights from disk.
            mode: As `pause`.
        """
        _check(level in (0, 1, 2) and not isinstance(level, bool), f"level is {level!r}: one of 0, 1, 2")
        pausing = self.pause(mode, clear_cache=level > 0)

        def attempt() -> Any:
            if pausing.attempt() is _NOT_YET:
                return _NOT_YET
            if level == 0:
                self._asleep.add(_SCHEDULING)
            else:
                self._release()
            return level

        return Later(attempt)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Restore what sleeps, or those parts of it; return whether all is awake.

        Generation goes on then, unless nothing slept or was about to.

        Args:
            tags: Of "weights", "kv_cache", "scheduling"; None for all.
        """
        wanted = list(_TAGS) if tags is None else tags
        unknown = [tag for tag in wanted if tag not in _TAGS] if isinstance(wanted, list) else [wanted]
        _check(not unknown, f"tags has {unknown}: of {', '.join(_TAGS)}")
        if not self._asleep and all(each.method != "sleep" for each in self._waiting):
            return True
        for part in _PARTS:
            if part in self._asleep and part in wanted:
                self._engine.restore(part)
                self._asleep.discard(part)
        if _SCHEDULING in wanted:
            self._asleep.discard(_SCHEDULING)
        if not self._asleep:
            self.resume()
        return not self._asleep

    def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> Later:
        """Read an adapter on a thread, then let requests name it.

        Args:
            lora_name: What they call it.
            lora_path: A PEFT directory.
            load_inplace: Whether it may take the place of one of that name.
        """
        store = self._adapters()
        _check(bool(lora_name) and bool(lora_path), "lora_name and lora_path must both be set")
        reading = self._reader.submit(store.read, lora_name, lora_path)

        def attempt() -> Any:
            if not reading.done():
                return _NOT_YET
            adapter, store = reading.result(), self._adapters()
            is_there = lora_name in store
            _check(load_inplace or not is_there, f"there is an adapter {lora_name!r} already")
            if is_there:
                self._remove(store, lora_name)
            store.add(adapter)
            return True

        return Later(attempt)

    def unload_lora_adapter(self, lora_name: str) -> bool:
        """Refuse further requests for an adapter, and free it once the last that has it is done."""
        store = self._adapters()
        _check(lora_name in store, f"there is no adapter {lora_name!r}", "not_found")
        self._remove(store, lora_name)
        return True

    def _begin(self, order: dict[str, Any]) -> Any:
        method = self._methods.get(order["method"])
        if method is None:
            raise CallError(f"unknown method {order['method']!r}: the engine knows {', '.join(self._methods)}")
        args, kwargs = order.get("args", []), order.get("kwargs", {})
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as exc:
            raise CallError(f"{order['method']} takes other arguments: {exc}") from exc
        return method(*args, **kwargs)

    def _try(self, waiting: _Waiting) -> None:
        """Do what can be done of a call now, and answer it if that is all."""
        try:
            result = waiting.attempt()
            while isinstance(result, Later):
                waiting = _Waiting(waiting.call_id, waiting.method, result.attempt)
                result = waiting.attempt()
        except CallError as exc:
            self._reply(waiting, {"error": str(exc), "fault": exc.fault})
        except Exception as exc:  # a call that fails is no reason for the engine to end
            logger.exception("%s failed", waiting.method)
            self._reply(waiting, {"error": f"{waiting.method} failed: {exc}", "fault": "failed"})
        else:
            if result is _NOT_YET:
                self._waiting.append(waiting)
            else:
                self._reply(waiting, {"result": result})

    def _reply(self, waiting: _Waiting, body: dict[str, Any]) -> None:
        if waiting.call_id is not None:
            self._link.send_reply(waiting.call_id, body)

    def _freeze(self) -> None:
        self._stepper.finish()
        self._state = _State.FROZEN
        self._add_held()
        self._link.publish(self._engine.idle_step())  # the figures, with those who came meanwhile

    def _add_held(self) -> None:
        held, self._held = self._held, []
        for request in held:
            self.add(request)

    def _release(self) -> None:
        for part in _PARTS:
            if part not in self._asleep:
                self._engine.release(part)
                self._asleep.add(part)

    def _adapters(self) -> AdapterStore:
        _check("weights" not in self._asleep, "the engine is asleep: wake_up it first", "conflict")
        store = self._engine.adapters
        if store is None:
            raise CallError("this engine has no adapters")
        return store

    def _remove(self, store: AdapterStore, name: str) -> None:
        store.remove(name)
        self._waiting.append(_Waiting(None, "freeing an adapter", self._free))

    def _free(self) -> Any:
        if "weights" in self._asleep:
            return _NOT_YET
        store = self._engine.adapters
        return True if store is None or store.try_free() else _NOT_YET


def _without(request: AddRequest, gone: Set[int]) -> AddRequest | None:
    """Return a request without those of its sequences that are gone; None if none is left."""
    sequences = (Fork(request.handle, request.seed), *request.forks)
    left = [each for each in sequences if each.handle not in gone]
    if len(left) == len(sequences):
        return request
    return replace(request, handle=left[0].handle, seed=left[0].seed, forks=tuple(left[1:])) if left else None


def _check(is_good: bool, message: str, fault: Any = "invalid") -> None:
    if not is_good:
        raise CallError(message, fault=fault)
