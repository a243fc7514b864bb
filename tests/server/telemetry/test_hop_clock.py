import time

from ringserve.server.telemetry.hop_clock import BUCKET_BOUNDS_US, HOPS, NUM_BUCKETS, HopClock
from ringserve.shm_transport.ring import RecordHeader


def header(scheduled_ns: int, forward_done_ns: int, published_ns: int) -> RecordHeader:
    return RecordHeader(*[0] * 18)._replace(
        scheduled_ns=scheduled_ns, forward_done_ns=forward_done_ns, published_ns=published_ns
    )


def bucket_of(counts: tuple[int, ...]) -> int:
    assert sum(counts) == 1
    return counts.index(1)


def test_each_hop_falls_into_the_bucket_of_its_microseconds() -> None:
    clock, now_ns = HopClock(), time.monotonic_ns()
    clock.note(header(now_ns - 9_000_000, now_ns - 4_000_000, now_ns - 3_990_000), now_ns - 3_989_500, now_ns)
    times = clock.snapshot()
    assert tuple(times) == HOPS
    for hop, elapsed_us in zip(HOPS, (5000, 10, 0, 3989), strict=False):
        bucket = bucket_of(times[hop].counts)
        assert elapsed_us <= BUCKET_BOUNDS_US[bucket]
        assert bucket == 0 or elapsed_us > BUCKET_BOUNDS_US[bucket - 1]
    assert times["scheduled_to_forward_done"].sum_s == 0.005
    assert 0 <= times["text_to_written"].sum_s < 60


def test_a_record_of_figures_alone_is_no_step() -> None:
    clock = HopClock()
    clock.note(header(0, 0, 17), 18, 19)
    assert all(sum(times.counts) == 0 for times in clock.snapshot().values())


def test_a_hop_of_hours_falls_into_the_last_bucket_and_one_backwards_into_the_first() -> None:
    clock = HopClock()
    clock.note(header(10**13, 1, 10**14), 10**14, 10**14)
    times = clock.snapshot()
    assert bucket_of(times["scheduled_to_forward_done"].counts) == 0
    assert bucket_of(times["forward_done_to_published"].counts) == NUM_BUCKETS - 1
