"""Signals held back for a moment, so that what their handlers raise leaves nothing half made."""

import contextlib
import signal
import threading
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGINT first: it has a handler that raises in any program


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Let the handlers of signals that come meanwhile run at the end, and raise there what they raise.

    A process that is launched inside has a name before anything can be raised: who holds it can end it.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler runs there
        yield
        return
    come: list[int] = []
    held = [each for each in _SIGNALS if callable(signal.getsignal(each))]
    handlers = {each: signal.signal(each, lambda signum, _: come.append(signum)) for each in held}
    try:
        yield
    finally:
        for each, handler in reversed(handlers.items()):
            signal.signal(each, handler)
        for signum in come[:1]:
            signal.raise_signal(signum)
