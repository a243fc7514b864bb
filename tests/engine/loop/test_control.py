"""The fixed table of calls and the pause, over an engine and a link that are played by the test."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from ringserve.engine.interface import CallError, MemoryPart, RequestFailedError
from ringserve.engine.loop.control import Control
from ringserve.shm_transport.messages import AddRequest, Fork
from ringserve.shm_transport.request_ring import Call
from ringserve.shm_transport.step import Step


def add(handle: int, *forks: int) -> AddRequest:
    own = tuple(Fork(fork, 0) for fork in forks)
    return AddRequest(handle=handle, prompt_token_ids=np.ones(1, np.int32), max_tokens=2, forks=own)


class Played:
    """Engine, adapter store, link and stepper in one."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.replies: dict[int, dict[str, Any]] = {}
        self.events: list[Any] = []
        self.names: set[str] = set()
        self.restoring: Exception | None = None
        self.has_freed = True
        self.control = Control(self, self, self)  # type: ignore[arg-type]
        self._num_calls = 0

    def order(self, method: str, *args: Any, **kwargs: Any) -> int:
        self._num_calls += 1
        body = json.dumps({"method": method, "args": args, "kwargs": kwargs}).encode()
        self.control.call(Call(self._num_calls, body))
        self.control.retry()
        return self._num_calls

    def result(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.replies[self.order(method, *args, **kwargs)]["result"]

    def fault(self, method: str, *args: Any, **kwargs: Any) -> str:
        return self.replies[self.order(method, *args, **kwargs)]["fault"]

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def adapters(self) -> "Played":
        return self

    def add(self, request: AddRequest | str) -> None:
        if isinstance(request, str):
            self.names.add(request)
        elif request.handle == 99:
            raise RequestFailedError(99, "no")
        else:
            self.live |= {request.handle, *(fork.handle for fork in request.forks)}

    def abort(self, handles: Iterable[int]) -> None:
        self.live -= set(handles)

    def finish(self) -> None:
        self.events.append("finish")

    def reset_prefix_cache(self, *, preempts: bool) -> bool:
        self.events.append(("reset", preempts))
        return preempts or not self.live

    def release(self, part: MemoryPart) -> None:
        self.events.append(("release", part))

    def restore(self, part: MemoryPart) -> None:
        if self.restoring is not None:
            raise self.restoring
        self.events.append(("restore", part))

    def read(self, name: str, path: str) -> str:
        if path == "/nowhere":
            raise CallError("nothing there", fault="not_found")
        return name

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def remove(self, name: str) -> None:
        self.names.remove(name)

    def try_free(self) -> bool:
        self.events.append("free")
        return self.has_freed

    def stats(self) -> dict[str, int]:
        return {"num_steps": 3}

    def idle_step(self) -> Step:
        return Step(handles=np.empty(0, np.uint64), token_ids=np.empty(0, np.int32), num_running=len(self.live))

    def note_aborted(self, num_handles: int) -> None:
        pass

    def publish(self, step: Step) -> int:
        self.events.append(("publish", step.num_running))
        return 0

    def send_reply(self, call_id: int, body: dict[str, Any]) -> None:
        assert call_id not in self.replies
        self.replies[call_id] = body

    def send_failure(self, failure: RequestFailedError) -> None:
        self.events.append(("failure", failure.handle))


@pytest.fixture
def played() -> Played:
    return Played()


def test_keep_stops_the_steps_at_once_and_resume_goes_on(played: Played) -> None:
    played.control.add(add(1))
    assert played.control.has_step
    assert played.result("pause", "keep", False) is True
    assert not played.control.has_step
    assert played.live == {1}
    assert ("reset", True) not in played.events
    assert played.result("is_paused") is True
    assert played.result("resume") is True
    assert played.control.has_step


def test_wait_answers_once_what_was_there_is_done_and_holds_what_comes(played: Played) -> None:
    played.control.add(add(1))
    pausing = played.order("pause", "wait")
    played.control.add(add(2))
    assert pausing not in played.replies
    assert played.control.has_step
    assert played.live == {1}
    played.live.clear()  # it has run to its end
    played.control.retry()
    assert played.replies[pausing] == {"result": True}
    assert ("reset", True) in played.events
    assert not played.control.has_step
    assert played.live == {2}
    assert played.events[-2] == ("publish", 1)  # the figures know of it


def test_a_held_request_that_was_aborted_is_not_run(played: Played) -> None:
    played.control.add(add(1))
    played.order("pause", "wait")
    played.control.add(add(2, 3))
    played.control.add(add(4))
    played.control.abort([3, 4])
    played.live.clear()
    played.control.retry()
    assert played.live == {2}


def test_nothing_is_kept_of_a_held_request_that_was_aborted(played: Played) -> None:
    played.control.add(add(1))
    played.order("pause", "wait")
    played.control.add(add(99))  # the engine would refuse it
    played.control.add(add(2, 3, 4))
    played.control.abort([99, 2])
    played.control.abort([4])
    assert [(held.handle, held.forks) for held in played.control._held] == [(3, ())]
    played.order("resume")
    assert played.live == {1, 3}
    assert ("failure", 99) not in played.events


def test_a_held_request_that_cannot_run_fails_when_its_turn_comes(played: Played) -> None:
    played.control.add(add(1))
    played.order("pause", "wait")
    played.control.add(add(99))
    assert ("failure", 99) not in played.events
    played.order("resume")
    assert ("failure", 99) in played.events


def test_resume_before_the_pause_is_reached_ends_the_pause_with_an_error(played: Played) -> None:
    played.control.add(add(1))
    pausing = played.order("pause", "wait")
    played.order("resume")
    assert played.replies[pausing]["fault"] == "conflict"
    assert played.control.has_step


def test_keep_after_wait_freezes_and_both_are_answered(played: Played) -> None:
    played.control.add(add(1))
    waiting = played.order("pause", "wait", False)
    keeping = played.order("pause", "keep", False)
    assert played.replies[waiting] == played.replies[keeping] == {"result": True}
    assert played.live == {1}


def test_sleep_frees_both_parts_once_and_wake_up_restores_them_by_tag(played: Played) -> None:
    assert played.result("sleep", 1, "keep") == 1
    assert played.result("sleep", 2, "keep") == 2
    assert [event for event in played.events if event[0] == "release"] == [
        ("release", "weights"), ("release", "kv_cache")
    ]  # fmt: skip
    assert played.result("is_sleeping") is True
    assert played.fault("resume") == "conflict"
    assert played.fault("load_lora_adapter", "a", "/a") == "conflict"
    assert played.result("wake_up", ["weights"]) is False
    assert played.result("is_paused") is True
    assert played.result("wake_up", ["kv_cache"]) is True
    assert played.result("is_sleeping") is False
    assert played.result("is_paused") is False
    assert [event for event in played.events if event[0] == "restore"] == [
        ("restore", "weights"), ("restore", "kv_cache")
    ]  # fmt: skip


def test_level_0_frees_nothing_and_wakes_by_the_scheduling_tag(played: Played) -> None:
    played.result("sleep", 0)
    assert played.result("is_sleeping") is True
    assert not [event for event in played.events if event[0] == "release"]
    assert played.result("wake_up", ["scheduling"]) is True
    assert played.result("is_paused") is False


def test_a_wake_up_before_the_sleep_is_reached_ends_it_with_an_error(played: Played) -> None:
    played.control.add(add(1))
    sleeping = played.order("sleep", 1, "wait")
    assert sleeping not in played.replies
    assert played.result("wake_up") is True
    assert played.replies[sleeping]["fault"] == "conflict"
    played.live.clear()
    played.control.retry()
    assert played.result("is_sleeping") is played.result("is_paused") is False
    assert not [event for event in played.events if event[0] == "release"]


def test_what_cannot_be_restored_stays_asleep_and_can_be_tried_again(played: Played) -> None:
    played.result("sleep", 1)
    played.restoring = OSError("the disk is gone")
    failed = played.order("wake_up")
    assert played.replies[failed]["fault"] == "failed"
    assert "the disk is gone" in played.replies[failed]["error"]
    assert played.result("is_sleeping") is True
    played.restoring = None
    assert played.result("wake_up") is True


def test_an_adapter_is_read_and_added_and_removed_and_freed_when_nobody_has_it(played: Played) -> None:
    def settle(call_id: int) -> dict[str, Any]:
        while call_id not in played.replies:
            played.control.retry()
        return played.replies[call_id]

    assert settle(played.order("load_lora_adapter", "a", "/a")) == {"result": True}
    assert settle(played.order("load_lora_adapter", "a", "/b"))["fault"] == "invalid"
    assert settle(played.order("load_lora_adapter", "a", "/b", load_inplace=True)) == {"result": True}
    assert settle(played.order("load_lora_adapter", "b", "/nowhere"))["fault"] == "not_found"
    played.has_freed = False
    assert played.result("unload_lora_adapter", "a") is True
    assert played.names == set()
    assert played.fault("unload_lora_adapter", "a") == "not_found"
    played.has_freed = True
    played.control.retry()
    num_looks = played.events.count("free")
    played.control.retry()
    assert played.events.count("free") == num_looks


@pytest.mark.parametrize(
    "order",
    [
        ("pause", "abort"), ("pause", 3), ("pause", "keep", "yes"), ("sleep", 3), ("sleep", True), ("wake_up", ["all"]),
        ("wake_up", "weights"), ("wake_up", [[]]), ("reset_prefix_cache", 1), ("stats", 1), ("dance",), ("__init__",),
        ("load_lora_adapter", "a", ""), ("retry",), ("has_step",),
    ],
)  # fmt: skip
def test_what_is_not_in_the_table_or_takes_other_arguments_is_the_callers_fault(
    played: Played, order: tuple[Any, ...]
) -> None:
    assert played.fault(*order) == "invalid"
    assert played.result("is_paused") is False


def test_a_busy_engine_keeps_its_cache_unless_told_to_take_it(played: Played) -> None:
    played.control.add(add(1))
    assert played.result("reset_prefix_cache") is False
    assert played.result("reset_prefix_cache", reset_running_requests=True) is True
    assert played.events[-2:] == ["finish", ("reset", True)]


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"3", b"{}", b'{"method": "stats", "args": ' + b"[" * 99_999])
def test_a_call_that_cannot_be_read_gets_an_error(played: Played, body: bytes) -> None:
    assert played.control.call(Call(7, body)) is False
    assert played.replies[7]["fault"] == "invalid"
