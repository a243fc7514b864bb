"""kill -9 between any two steps of the protocol: the other side drains what was posted, sees the death, and goes on.

The test starts this file once as a program, the arena, which has one thread and so may fork. A round is one ring and
one death: the arena is the server of an engine that dies, or it starts a server that dies and leaves its engine behind.
The points are set in the doomed process alone, by wrapped semaphores, subclasses and values that kill when looked at.
"""

import contextlib
import ctypes
import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

from ringserve.shm_transport import process, segment, step_ring
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import PeerDiedError
from ringserve.shm_transport.records import RecordKind, RingKind
from ringserve.shm_transport.ring import Consumer, Producer
from ringserve.shm_transport.segment import Segment, SegmentHeader
from ringserve.shm_transport.step import Step
from ringserve.shm_transport.step_ring import Message, StepReader, StepRecord, StepWriter

CONFIG = RingConfig(num_step_slots=4, max_rows=8, max_tokens=64, max_logprob_entries=64)
EPOCH = 77
LIMIT_S = 20.0  # a round takes milliseconds: who waits this long hangs
NOT_KILLED = 3  # exit status of a process that never came to its point

ENGINE_START_POINTS = [
    "before attach",
    "before shm_open",
    "before mmap",
    "before semaphore 0",
    "before semaphore 1",
    "after attach",
]
PRODUCER_POINTS = [
    "before free is taken",
    "after free is taken",
    "between two columns",
    "between columns and header",
    "inside the header",
    "before filled is posted",
    "after filled is posted",
]
SERVER_START_POINTS = [
    "before shm_open",
    "before fallocate",
    "before mmap",
    "before semaphore 0",
    "before semaphore 1",
    "before the header",
    "after create",
]
UNLINK_POINTS = [
    "after ATTACHED is read",
    "before unlink of memory",
    "before unlink of semaphore 0",
    "before unlink of semaphore 1",
    "after unlink",
]
CONSUMER_POINTS = [
    "before filled is taken",
    "after filled is taken",
    "between header and columns",
    "after the copy",
    "before free is posted",
    "after free is posted",
]
AFTER_POST = ("after filled is posted", "after free is posted")  # the record in hand has crossed
ROUNDS = [2, pytest.param(200, marks=pytest.mark.slow)]


# What the doomed process does.


class Killer:
    """Ends its process when it passes the armed point."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.is_armed = False

    def passes(self, point: str) -> None:
        if self.is_armed and point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def trap(self, owner: object, attribute: str, point: str) -> None:
        """Put the points `point`, or `point` with {} = 0, 1, ..., before the calls of a function."""
        function, num_calls = getattr(owner, attribute), 0

        def trapped(*args: object, **options: object) -> object:
            nonlocal num_calls
            self.passes(point.format(num_calls))
            num_calls += 1
            return function(*args, **options)

        setattr(owner, attribute, trapped)

    def trap_start(self) -> None:
        self.trap(posix_ipc, "SharedMemory", "before shm_open")
        self.trap(os, "posix_fallocate", "before fallocate")
        self.trap(mmap, "mmap", "before mmap")
        self.trap(posix_ipc, "Semaphore", "before semaphore {}")
        self.trap(SegmentHeader, "pack", "before the header")

    def trap_ring(self, ring: Segment) -> Segment:
        """Return the ring with wrapped semaphores, for a StepWriter or StepReader of trapped parts."""
        step_ring.Producer = type("TrappedProducer", (TrappedProducer,), {"killer": self})
        step_ring.Consumer = type("TrappedConsumer", (TrappedConsumer,), {"killer": self})
        return replace(
            ring, filled=TrappedSemaphore(ring.filled, "filled", self), free=TrappedSemaphore(ring.free, "free", self)
        )

    def trap_step(self, step: Step) -> Step:
        """Return the step with a column and a header field that kill while they are written."""
        return replace(step, token_ids=TrappedColumn(step.token_ids, self), num_running=TrappedField(self))


class TrappedSemaphore:
    def __init__(self, semaphore: posix_ipc.Semaphore, name: str, killer: Killer) -> None:
        self._semaphore, self._name, self._killer = semaphore, name, killer

    @property
    def value(self) -> int:
        return self._semaphore.value

    def acquire(self, timeout_s: float | None = None) -> None:
        self._killer.passes(f"before {self._name} is taken")
        self._semaphore.acquire(timeout_s)
        self._killer.passes(f"after {self._name} is taken")

    def release(self) -> None:
        self._killer.passes(f"before {self._name} is posted")
        self._semaphore.release()
        self._killer.passes(f"after {self._name} is posted")


class TrappedProducer(Producer):
    killer: Killer

    @property
    def sequence(self) -> int:
        self.killer.passes("between columns and header")
        return self._sequence

    @sequence.setter
    def sequence(self, value: int) -> None:
        self._sequence = value


class TrappedConsumer(Consumer):
    killer: Killer

    def check(self, sequence: int) -> None:
        self.killer.passes("between header and columns")
        super().check(sequence)

    def release(self) -> None:
        self.killer.passes("after the copy")
        super().release()


class TrappedColumn:
    """numpy asks for the array when it copies it, after the columns before it."""

    def __init__(self, array: np.ndarray, killer: Killer) -> None:
        self._array, self._killer = array, killer

    def __len__(self) -> int:
        return len(self._array)

    def __array__(self, *args: object, **options: object) -> np.ndarray:
        self._killer.passes("between two columns")
        return self._array


class TrappedField:
    """struct asks for the number when it has written the fields before it."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer

    def __index__(self) -> int:
        self._killer.passes("inside the header")
        return 0


# The two sides.


def checked_step(n: int) -> Step:
    """Step n, of a size that changes with n; the CRC of its tokens is its first handle."""
    tokens = np.random.default_rng(n).integers(0, 2**31 - 1, 1 + n % 8).astype(np.int32)
    handles = np.full(len(tokens), n, np.uint64)
    handles[0] = zlib.crc32(tokens.tobytes())
    return Step(handles=handles, token_ids=tokens)


def check(record: StepRecord | Message | None, n: int) -> None:
    assert isinstance(record, StepRecord), f"{record} in place of step {n}"
    expected = checked_step(n)
    assert (record.header.step, record.handles) == (n, expected.handles.tolist())
    assert zlib.crc32(np.array(record.token_ids, np.int32).tobytes()) == record.handles[0], f"step {n} is torn"


def read_next(reader: StepReader) -> StepRecord | Message | None:
    deadline = time.monotonic() + LIMIT_S
    while not reader.consumer.wait(timeout_s=0.1):
        assert time.monotonic() < deadline, "the ring is silent"
    return reader.read()


def doomed_engine(name: str, point: str, num_records: int, arena: int) -> None:
    """Publish `num_records` steps, then die at the point."""
    process.die_with_parent(arena)
    killer = Killer(point)
    killer.is_armed = point in ENGINE_START_POINTS
    killer.trap_start()
    killer.passes("before attach")
    ring = killer.trap_ring(segment.attach(name, RingKind.STEP, EPOCH))
    killer.passes("after attach")
    writer = StepWriter(ring, on_full=lambda: None)
    writer.publish_message(RecordKind.ATTACHED)
    for n in range(num_records):
        writer.publish(checked_step(n))
    killer.is_armed = True
    writer.publish(killer.trap_step(checked_step(num_records)))


def lasting_engine(name: str, server: int, report: int) -> None:
    """Publish until the server is dead; report how many records went out."""
    os.write(report, b"%d\n" % os.getpid())
    num_published, deadline = 0, time.monotonic() + LIMIT_S

    def on_full() -> None:
        if os.getppid() != server:
            raise PeerDiedError("the server died")
        assert time.monotonic() < deadline, "the ring stays full"

    writer = StepWriter(segment.attach(name, RingKind.STEP, EPOCH), on_full)
    writer.publish_message(RecordKind.ATTACHED)
    with contextlib.suppress(PeerDiedError):
        while True:
            writer.publish(checked_step(num_published))
            num_published += 1
    os.write(report, b"%d %d\n" % (num_published, writer.num_stalls))


def doomed_server(point: str, num_records: int, arena: int, report: int) -> None:
    """Create a ring, start an engine, read `num_records` steps, then die at the point."""
    process.die_with_parent(arena)
    killer = Killer(point)
    killer.is_armed = point in SERVER_START_POINTS + UNLINK_POINTS
    killer.trap_start()
    killer.trap(posix_ipc, "unlink_shared_memory", "before unlink of memory")
    killer.trap(posix_ipc, "unlink_semaphore", "before unlink of semaphore {}")
    ring = segment.create(segment.new_base_name() + "-step", segment.step_header(CONFIG, EPOCH))
    killer.passes("after create")
    server = os.getpid()
    fork(lambda: lasting_engine(ring.name, server, report))
    reader = StepReader(killer.trap_ring(ring))
    assert read_next(reader) == Message(RecordKind.ATTACHED, b"")
    killer.passes("after ATTACHED is read")
    ring.unlink()
    killer.passes("after unlink")
    for n in range(num_records):
        check(read_next(reader), n)
    killer.is_armed = True
    read_next(reader)


# The arena.


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child of this process and return the child's pid."""
    pid = os.fork()
    if pid:
        return pid
    status = NOT_KILLED
    try:
        work()
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(pid: int) -> int | None:
    """The exit status of a child, negative for a signal; None while it runs."""
    pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def wait_ended(pid: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while (status := ended(pid)) is None:
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.001)
    return status


def left_by(pid: int) -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if f"ringserve-{pid}-" in path.name]


def engine_round(point: str, num_records: int) -> float:
    """Kill an engine, read what is there; return the seconds from its end to the end of the reading."""
    ring = segment.create(segment.new_base_name() + "-step", segment.step_header(CONFIG, EPOCH))
    arena, reader, records, status = os.getpid(), StepReader(ring), [], None
    pid = fork(lambda: doomed_engine(ring.name, point, num_records, arena))
    deadline = time.monotonic() + LIMIT_S
    while status is None or reader.consumer.num_pending:
        if reader.consumer.wait(timeout_s=0.005):
            records.append(reader.read())
        if status is None:
            status, ended_at = ended(pid), time.monotonic()
        assert time.monotonic() < deadline, "the ring is silent"
    assert status == -signal.SIGKILL, f"the engine ended with {status}"
    if point in ENGINE_START_POINTS:
        assert records == []
    else:
        assert records[0] == Message(RecordKind.ATTACHED, b"")
        assert len(records) == 1 + num_records + (point in AFTER_POST)
        for n, record in enumerate(records[1:]):
            check(record, n)
    ring.unlink()
    ring.close()
    assert left_by(arena) == []
    return time.monotonic() - ended_at


def server_round(point: str, num_records: int) -> float:
    """Kill a server; return the seconds from its end to the engine's."""
    arena = os.getpid()
    report, report_in = os.pipe()
    pid = fork(lambda: doomed_server(point, num_records, arena, report_in))
    os.close(report_in)
    status, ended_at, engine = wait_ended(pid), time.monotonic(), 0
    assert status == -signal.SIGKILL, f"the server ended with {status}"
    with os.fdopen(report) as lines:
        if line := lines.readline():
            engine = int(line)
            try:
                assert select.select([report], [], [], LIMIT_S)[0], "the engine hangs"
                waited_s = time.monotonic() - ended_at
                num_published, num_stalls = map(int, lines.readline().split())
            finally:
                os.kill(engine, signal.SIGKILL)
                os.waitpid(engine, 0)  # the arena adopts orphans
    if point in SERVER_START_POINTS:
        assert engine == 0
    else:
        expected = CONFIG.num_step_slots + (0 if point in UNLINK_POINTS else num_records + (point in AFTER_POST))
        assert num_published == expected, f"{num_published} steps went out, expected {expected}"
        assert num_stalls >= 1
    if point in (*CONSUMER_POINTS, "after unlink"):
        assert left_by(pid) == []  # gone since ATTACHED
    if left_by(pid):
        segment.unlink_stale()
    assert left_by(pid) == []
    return waited_s if engine else 0.0


def main() -> None:
    """Answer each line [side, point, rounds] with an error, or with the longest time to see the death."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    rounds = {"engine": engine_round, "server": server_round}
    for line in sys.stdin:
        side, point, num_rounds = json.loads(line)
        rng, answer = random.Random(point), {"error": "", "seen_s": 0.0}
        try:
            for _ in range(num_rounds):
                answer["seen_s"] = max(answer["seen_s"], rounds[side](point, rng.randrange(11)))
        except BaseException:
            answer["error"] = traceback.format_exc()
        print(json.dumps(answer), flush=True)


@pytest.fixture(scope="module")
def arena() -> Iterator[Callable[..., None]]:
    program = [sys.executable, "-W", "error", __file__]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as arena:

        def play(side: str, point: str, num_rounds: int) -> None:
            arena.stdin.write(json.dumps([side, point, num_rounds]).encode() + b"\n")
            arena.stdin.flush()
            assert select.select([arena.stdout], [], [], 150)[0], "the arena hangs"
            answer = json.loads(arena.stdout.readline())
            assert not answer["error"], answer["error"]
            print(f"the death was seen after at most {1000 * answer['seen_s']:.0f} ms in {num_rounds} rounds")

        try:
            yield play
        finally:
            arena.kill()  # its children follow it, or their server


@pytest.mark.parametrize("num_rounds", ROUNDS)
@pytest.mark.parametrize("point", ENGINE_START_POINTS)
def test_an_engine_killed_before_it_is_attached_is_seen_to_be_dead(
    arena: Callable, point: str, num_rounds: int
) -> None:
    arena("engine", point, num_rounds)


@pytest.mark.parametrize("num_rounds", ROUNDS)
@pytest.mark.parametrize("point", PRODUCER_POINTS)
def test_a_killed_producer_leaves_the_whole_records_it_posted(arena: Callable, point: str, num_rounds: int) -> None:
    arena("engine", point, num_rounds)


@pytest.mark.parametrize("num_rounds", ROUNDS)
@pytest.mark.parametrize("point", CONSUMER_POINTS)
def test_a_killed_consumer_ends_the_producers_wait(arena: Callable, point: str, num_rounds: int) -> None:
    arena("server", point, num_rounds)


@pytest.mark.parametrize("num_rounds", ROUNDS)
@pytest.mark.parametrize("point", SERVER_START_POINTS + UNLINK_POINTS)
def test_a_server_killed_at_its_start_leaves_nothing_after_the_next(
    arena: Callable, point: str, num_rounds: int
) -> None:
    arena("server", point, num_rounds)


if __name__ == "__main__":
    main()
