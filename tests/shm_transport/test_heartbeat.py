import time

from ringserve.shm_transport.heartbeat import Heartbeat, Pulse, PulseReader
from ringserve.shm_transport.segment import Segment


def test_an_open_step_is_busy_until_its_time_out(step_segment: Segment) -> None:
    heartbeat, reader = Heartbeat(step_segment), PulseReader(step_segment)
    heartbeat.open_step()
    time.sleep(0.05)
    pulse = reader.read()
    assert 0.05 <= pulse.open_step_s < 5
    assert pulse.stuck_reason(step_timeout_s=60) is None
    assert "a step has been running" in (pulse.stuck_reason(step_timeout_s=0.01) or "")
    heartbeat.close_step()
    assert reader.read().open_step_s == 0
    heartbeat.close()


def test_the_thread_keeps_the_engine_alive_and_its_end_shows(step_segment: Segment) -> None:
    heartbeat, reader = Heartbeat(step_segment), PulseReader(step_segment)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and reader.read().alive_age_s < 0.2:
        time.sleep(0.01)
    while time.monotonic() < deadline and reader.read().alive_age_s > 0.1:
        time.sleep(0.01)
    assert reader.read().alive_age_s < 0.3
    heartbeat.close()
    assert "no sign of life" in (Pulse(alive_age_s=1.6, open_step_s=0, num_stalls=0, stall_s=0).stuck_reason(60) or "")


def test_stalls_are_exported(step_segment: Segment) -> None:
    heartbeat, reader = Heartbeat(step_segment), PulseReader(step_segment)
    heartbeat.count_stalls(3, 1_500_000_000)
    assert (reader.read().num_stalls, reader.read().stall_s) == (3, 1.5)
    heartbeat.close()
