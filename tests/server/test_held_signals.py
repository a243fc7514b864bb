import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from ringserve.server.held_signals import held_signals


@pytest.fixture
def raising() -> Iterator[type[Exception]]:
    """Let SIGTERM raise, as it does while a server starts."""

    class EndedError(Exception):
        pass

    def end(_: int, __: FrameType | None) -> None:
        raise EndedError

    previous = signal.signal(signal.SIGTERM, end)
    yield EndedError
    signal.signal(signal.SIGTERM, previous)


def test_what_a_handler_raises_comes_at_the_end(raising: type[Exception]) -> None:
    steps = []

    def be_told_twice() -> None:
        with held_signals():
            for step in range(2):
                signal.raise_signal(signal.SIGTERM)
                steps.append(step)

    with pytest.raises(raising):
        be_told_twice()
    assert steps == [0, 1]
    with pytest.raises(raising):  # and as it was from then on
        signal.raise_signal(signal.SIGTERM)


def test_an_error_inside_gives_the_handlers_back(raising: type[Exception]) -> None:
    with pytest.raises(KeyError), held_signals():
        raise KeyError
    with pytest.raises(raising):
        signal.raise_signal(signal.SIGTERM)


def test_without_a_signal_nothing_is_changed() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with held_signals():
        pass
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_other_threads_hold_nothing() -> None:
    done = []

    def hold() -> None:
        with held_signals():
            done.append(True)

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert done == [True]
