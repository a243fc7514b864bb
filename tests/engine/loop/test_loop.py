import gc
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from ringserve.engine.interface import RequestFailedError
from ringserve.engine.loop import loop
from ringserve.shm_transport.messages import AddRequest, Data
from ringserve.shm_transport.request_ring import Abort, Call, InMessage
from ringserve.shm_transport.step import Step


def add(handle: int, max_tokens: int = 2) -> AddRequest:
    return AddRequest(handle=handle, prompt_token_ids=np.ones(1, np.int32), max_tokens=max_tokens)


def call(method: str) -> Call:
    return Call(1, json.dumps({"method": method}).encode())


class Scripted:
    """Engine and link in one: inbox by a script, one list for each look at it; notes what happens, in order."""

    def __init__(self, *inboxes: list[InMessage]) -> None:
        self.events: list[Any] = []
        self.heartbeat = self
        self._inboxes = [*inboxes, [call("shutdown")]]
        self._left: dict[int, int] = {}
        self._failures: list[RequestFailedError] = []

    def drain(self) -> list[InMessage]:
        return self._inboxes.pop(0)

    def wait(self, slice_s: float) -> list[InMessage]:  # noqa: ARG002  # the link's
        self.events.append("wait")
        return self._inboxes.pop(0)

    def publish(self, step: Step) -> int:
        self.events.append(("publish", step.num_running))
        return 5

    def note_aborted(self, num_handles: int) -> None:
        self.events.append(("aborted", num_handles))

    def send_ready(self, limits: dict[str, int]) -> None:
        self.events.append(("ready", limits["num_blocks"]))

    def send_failure(self, failure: RequestFailedError) -> None:
        self.events.append(("failure", failure.handle))

    def send_reply(self, call_id: int, body: dict[str, object]) -> None:
        self.events.append(("reply", call_id, *body))

    def open_step(self) -> None:
        self.events.append("open")

    def close_step(self) -> None:
        self.events.append("close")

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: AddRequest) -> None:
        if request.max_tokens == 0:
            raise RequestFailedError(request.handle, "nothing to do")
        self._left[request.handle] = request.max_tokens

    def abort(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self._left.pop(handle, None)

    def step(self) -> Step | None:
        self.events.append("step")
        self._left = {handle: left - 1 for handle, left in self._left.items() if left > 1}
        return self.idle_step()

    def after_step(self) -> None:
        self.events.append("after")

    def idle_step(self) -> Step:
        return Step(handles=np.empty(0, np.uint64), token_ids=np.empty(0, np.int32), num_running=len(self._left))

    def take_failures(self) -> list[RequestFailedError]:
        return []

    def take_data(self) -> list[Data]:
        return []

    def finish(self) -> Step | None:
        self.events.append("finish")
        return None

    def stats(self) -> dict[str, int]:
        return {}

    def limits(self) -> dict[str, int]:
        return {"num_blocks": 3}


def run(*inboxes: list[InMessage]) -> list[Any]:
    scripted = Scripted(*inboxes)
    loop.run(scripted, scripted)  # type: ignore[arg-type]
    return scripted.events


def test_a_record_is_out_before_the_engine_settles_the_step() -> None:
    events = run([add(1, max_tokens=1)])
    assert events == [
        *(("ready", 3), "wait", "open", "step", ("publish", 0), "after", "close"),
        *("wait", ("reply", 1, "result")),
    ]


def test_messages_are_taken_between_steps_and_waited_for_only_without_work() -> None:
    events = run([add(1, max_tokens=9)], [], [add(2)], [Abort([1, 2])])
    published = [event for event in events if event[0] == "publish"]
    assert published == [("publish", 1), ("publish", 1), ("publish", 2), ("publish", 0)]
    assert events.count("wait") == 2
    assert events.count("step") == 3  # the last record only tells of the abort


def test_a_refused_request_is_told_and_the_others_go_on() -> None:
    events = run([add(1, max_tokens=0), add(2, max_tokens=1)])
    assert ("failure", 1) in events
    assert ("publish", 0) in events


def test_an_unknown_call_gets_an_error() -> None:
    assert ("reply", 1, "error", "fault") in run([call("dance")])


def test_garbage_is_collected_when_the_engine_has_been_idle_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    collections = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(gc.isenabled()))
    run([add(1)], [], [], [], [])
    assert collections == [True, False]  # once at the start, once after the work, not again and again
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_now_and_then_by_an_engine_that_is_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    collections = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(gc.isenabled()))
    monkeypatch.setattr(loop, "_COLLECT_EVERY", 10)
    run([add(1, max_tokens=25)], *[[]] * 24)
    assert len(collections) == 1 + 2


def test_no_step_is_made_while_generation_is_paused_and_the_figures_are_told() -> None:
    pause = Call(2, json.dumps({"method": "pause", "args": ["keep", False]}).encode())
    events = run([add(1, max_tokens=9)], [pause], [], [add(2)], [Abort([1])], [call("resume")], [])
    paused = events[events.index(("reply", 2, "result")) : events.index(("reply", 1, "result"))]
    assert "step" not in paused
    assert [event for event in paused if event[0] == "publish"] == [("publish", 2), ("publish", 1)]
    assert events.count("step") == 1 + 2
