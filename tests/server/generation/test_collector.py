import asyncio

import pytest

from ringserve.server.errors import EngineGenerateError
from ringserve.server.generation.collector import RequestOutputCollector
from ringserve.server.generation.outputs import CompletionOutput, OutputKind, RequestOutput


class FakeWriter:
    """Keeps what it is given, in order; a test says whether it takes more."""

    def __init__(self) -> None:
        self.is_writable = True
        self.events: list[CompletionOutput | Exception] = []

    def write(self, output: CompletionOutput) -> None:
        assert self.is_writable
        self.events.append(output)

    def fail(self, error: Exception) -> None:
        self.events.append(error)


def make(kind: OutputKind = OutputKind.DELTA, n: int = 1) -> RequestOutputCollector:
    return RequestOutputCollector("r", [1, 2], n, kind)


def output(text: str, index: int = 0, finish_reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(index, text, [len(text)], finish_reason)


def texts(taken: RequestOutput | None) -> list[tuple[int, str]]:
    assert taken is not None
    return [(one.index, one.text) for one in taken.outputs]


def test_deltas_that_meet_a_full_slot_merge() -> None:
    collector = make()
    collector.put(output("ab"))
    collector.put(output("c"))
    collector.put(CompletionOutput(0, "def", [3], "stop", "f"))
    taken = collector.get_nowait()
    assert taken is not None
    assert taken.outputs == [CompletionOutput(0, "abcdef", [2, 1, 3], "stop", "f")]
    assert (taken.request_id, taken.prompt_token_ids, taken.finished) == ("r", [1, 2], True)


def test_a_cumulative_output_replaces_the_one_before_it() -> None:
    collector = make(OutputKind.CUMULATIVE)
    collector.put(output("a"))
    collector.put(output("ab"))
    taken = collector.get_nowait()
    assert texts(taken) == [(0, "ab")]
    assert taken.outputs[0].token_ids == [2]


def test_the_slot_is_empty_once_it_is_taken() -> None:
    collector = make()
    collector.put(output("a"))
    assert texts(collector.get_nowait()) == [(0, "a")]
    assert collector.get_nowait() is None
    collector.put(output("b"))
    assert texts(collector.get_nowait()) == [(0, "b")]


def test_final_only_comes_when_the_last_sequence_has_ended_ordered_by_index() -> None:
    collector = make(OutputKind.FINAL_ONLY, n=3)
    for index in (2, 0):
        collector.put(output(f"text {index}", index, "stop"))
        assert collector.get_nowait() is None
        assert not collector.is_finished
    collector.put(output("text 1", 1, "length"))
    taken = collector.get_nowait()
    assert texts(taken) == [(0, "text 0"), (1, "text 1"), (2, "text 2")]
    assert taken.finished
    assert collector.is_finished


def test_deltas_of_different_indexes_do_not_mix() -> None:
    collector = make(n=2)
    for text, index in (("a", 1), ("x", 0), ("b", 1), ("y", 0)):
        collector.put(output(text, index))
    taken = collector.get_nowait()
    assert texts(taken) == [(0, "xy"), (1, "ab")]
    assert not taken.finished


def test_only_the_last_output_of_the_last_sequence_is_finished() -> None:
    collector = make(n=2)
    collector.put(output("a", 0, "stop"))
    assert not collector.get_nowait().finished
    collector.put(output("b", 1, "stop"))
    assert collector.get_nowait().finished


def test_an_error_comes_after_the_tokens_before_it_and_again_when_asked_again() -> None:
    collector = make()
    collector.put(output("a"))
    collector.put_error(ValueError("broken"))
    collector.put_error(ValueError("a later one"))
    assert collector.is_finished
    assert texts(collector.get_nowait()) == [(0, "a")]
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            collector.get_nowait()


def test_an_error_after_the_end_is_ignored() -> None:
    collector = make()
    collector.put(output("a", 0, "stop"))
    collector.put_error(ValueError("too late"))
    assert collector.get_nowait().finished
    assert collector.get_nowait() is None


def test_an_error_ends_a_final_only_request_some_of_whose_sequences_have_ended() -> None:
    collector = make(OutputKind.FINAL_ONLY, n=2)
    collector.put(output("a", 0, "stop"))
    collector.put_error(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        collector.get_nowait()


def test_what_is_there_is_had_without_a_loop() -> None:
    collector = make()
    collector.put(output("a"))
    coroutine = collector.get()
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)  # ends at once: it never waited
    assert texts(stop.value.value) == [(0, "a")]


async def test_get_waits_for_a_put() -> None:
    collector = make()
    task = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    assert not task.done()
    collector.put(output("a"))
    collector.put(output("b"))  # before the task runs: the future is done already
    assert texts(await task) == [(0, "ab")]


async def test_get_waits_on_while_a_final_only_request_has_sequences_left() -> None:
    collector = make(OutputKind.FINAL_ONLY, n=2)
    task = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(output("a", 0, "stop"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    collector.put(output("b", 1, "stop"))
    assert texts(await task) == [(0, "a"), (1, "b")]


async def test_an_error_wakes_get() -> None:
    collector = make()
    task = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put_error(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await task


async def test_a_cancelled_get_loses_nothing() -> None:
    collector = make()
    task = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(output("a"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    collector.put(output("b"))
    taken = collector.get_nowait()
    if task.cancelled():
        assert texts(taken) == [(0, "ab")]
    else:
        assert texts(task.result()) + texts(taken) == [(0, "a"), (0, "b")]


def test_a_writable_writer_gets_each_put_itself() -> None:
    collector, writer = make(), FakeWriter()
    collector.attach(writer)
    sent = [output("a"), output("b"), output("c", 0, "stop")]
    for one in sent:
        collector.put(one)
        assert writer.events[-1] is one
    assert writer.events == sent
    assert collector.is_finished
    assert collector.get_nowait() is None


def test_a_writer_that_is_attached_late_gets_what_the_slot_holds_first() -> None:
    collector, writer = make(), FakeWriter()
    collector.put(output("a"))
    collector.put(output("b"))
    collector.attach(writer)
    collector.put(output("c"))
    assert [event.text for event in writer.events] == ["ab", "c"]


def test_deltas_merge_while_the_writer_is_full_and_leave_as_one_event() -> None:
    collector, writer = make(), FakeWriter()
    collector.attach(writer)
    writer.is_writable = False
    for text in "abc":
        collector.put(output(text))
    collector.flush()
    assert writer.events == []
    writer.is_writable = True
    collector.flush()
    collector.flush()
    collector.put(output("d"))
    assert [event.text for event in writer.events] == ["abc", "d"]


def test_a_put_never_overtakes_what_the_slot_holds() -> None:
    collector, writer = make(n=2), FakeWriter()
    collector.attach(writer)
    writer.is_writable = False
    collector.put(output("a", 0))
    writer.is_writable = True
    collector.put(output("x", 1))
    collector.put(output("b", 0))
    assert writer.events == []
    collector.flush()
    assert [(event.index, event.text) for event in writer.events] == [(0, "ab"), (1, "x")]


def test_a_flush_stops_when_the_writer_is_full_again() -> None:
    collector, writer = make(n=2), FakeWriter()
    collector.attach(writer)
    for index in (0, 1):
        collector.put(output("a", index), is_behind=True)
    write = writer.write

    def write_one(one: CompletionOutput) -> None:
        write(one)
        writer.is_writable = False

    writer.write = write_one  # type: ignore[method-assign]
    collector.flush()
    assert len(writer.events) == 1
    writer.is_writable = True
    collector.flush()
    assert [event.index for event in writer.events] == [0, 1]


def test_outputs_that_are_behind_leave_as_one_event_with_those_after_them() -> None:
    collector, writer = make(), FakeWriter()
    collector.attach(writer)
    collector.put(output("a"), is_behind=True)
    collector.put(output("b"), is_behind=True)
    collector.put(output("c"))
    assert writer.events == []
    collector.flush()
    assert [event.text for event in writer.events] == ["abc"]


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_writer_gets_an_error_after_the_tokens_before_it(is_behind: bool) -> None:
    collector, writer, error = make(), FakeWriter(), ValueError("broken")
    collector.attach(writer)
    collector.put(output("a"), is_behind=is_behind)
    collector.put_error(error)
    assert writer.events == [output("a"), error]


def test_an_error_waits_for_a_full_writer_and_comes_once() -> None:
    collector, writer, error = make(), FakeWriter(), ValueError("broken")
    collector.attach(writer)
    writer.is_writable = False
    collector.put(output("a"))
    collector.put_error(error)
    assert writer.events == []
    writer.is_writable = True
    collector.flush()
    collector.flush()
    assert writer.events == [output("a"), error]


def test_an_error_before_the_writer_is_attached_is_told_to_it() -> None:
    collector, writer, error = make(), FakeWriter(), ValueError("broken")
    collector.put_error(error)
    collector.attach(writer)
    assert writer.events == [error]


def test_a_full_writer_holds_one_output_for_each_sequence() -> None:
    collector, writer = make(n=3), FakeWriter()
    collector.attach(writer)
    writer.is_writable = False
    for n in range(3000):
        collector.put(CompletionOutput(n % 3, "x", [n]))
    writer.is_writable = True
    collector.flush()
    assert [(event.index, event.text) for event in writer.events] == [(index, "x" * 1000) for index in range(3)]
    assert all(event.token_ids == list(range(event.index, 3000, 3)) for event in writer.events)


def test_texts_that_merge_are_joined_once_when_they_are_taken() -> None:
    collector = RequestOutputCollector("a", [1], 1, OutputKind.DELTA)
    first = CompletionOutput(0, "word ", [5])
    collector.put(first)
    for _ in range(999):
        collector.put(CompletionOutput(0, "word ", [5]))
    assert first.text == "word "  # not grown by each delta, which would take quadratic time
    output = collector.get_nowait()
    assert output is not None
    assert output.outputs[0].text == "word " * 1000
    assert output.outputs[0].token_ids == [5] * 1000


class FakeHeld:
    """Tokens that a sequence keeps; each delta takes one."""

    def __init__(self, texts: str, index: int = 0) -> None:
        self.index = index
        self.left = list(texts)

    @property
    def has_held(self) -> bool:
        return bool(self.left)

    def take_held(self) -> CompletionOutput:
        return output(self.left.pop(0), self.index)


def test_held_tokens_leave_after_the_slot_and_before_an_error() -> None:
    collector, writer, error = make(), FakeWriter(), ValueError("broken")
    collector.attach(writer)
    writer.is_writable = False
    collector.put(output("a"))
    collector.hold(FakeHeld("bc"))
    collector.put_error(error)
    assert collector.has_pending
    assert writer.events == []
    writer.is_writable = True
    collector.flush()
    assert writer.events == [output("a"), output("b"), output("c"), error]
    assert not collector.has_pending


def test_held_tokens_leave_no_faster_than_the_writer_takes_them() -> None:
    collector, writer = make(), FakeWriter()
    collector.attach(writer)
    collector.hold(FakeHeld("abc"))
    write = writer.write

    def write_one(one: CompletionOutput) -> None:
        write(one)
        writer.is_writable = False

    writer.write = write_one  # type: ignore[method-assign]
    for num_written in (1, 2, 3):
        writer.is_writable = True
        collector.flush()
        assert len(writer.events) == num_written
    assert not collector.has_pending


def test_held_tokens_are_pulled_part_by_part() -> None:
    collector = make(n=2)
    collector.put(output("x", 1))
    collector.hold(FakeHeld("ab"))
    assert texts(collector.get_nowait()) == [(0, "a"), (1, "x")]
    assert texts(collector.get_nowait()) == [(0, "b")]
    assert collector.get_nowait() is None


async def test_held_tokens_wake_a_consumer_that_waits() -> None:
    collector = make()
    waiting = asyncio.ensure_future(collector.get())
    await asyncio.sleep(0)
    collector.hold(FakeHeld("a"))
    assert texts(await waiting) == [(0, "a")]


def test_held_tokens_that_cannot_be_made_text_end_their_request() -> None:
    collector, writer = make(), FakeWriter()
    collector.attach(writer)
    collector.put(output("a"))
    collector.hold(FakeHeld(""))
    collector.flush()
    assert writer.events[0] == output("a")
    assert isinstance(writer.events[1], EngineGenerateError)
    assert not collector.has_pending
    assert collector.is_finished


def test_a_failure_in_one_sequences_held_tokens_ends_a_pull_of_all() -> None:
    collector = make(n=2)
    for index in (0, 1):
        collector.hold(FakeHeld("", index))
    with pytest.raises(EngineGenerateError):
        collector.get_nowait()
