"""The number of the API key that a request came with, while its handler runs: the scheduler tells clients apart by it.

Set by the key layer of the HTTP side for each request, even to 0: the task of one that waited in a pipeline inherits
what the one before it had.
"""

from contextvars import ContextVar

_CURRENT: ContextVar[int] = ContextVar("key_number", default=0)


def set_key_number(number: int) -> None:
    """Note the key of the request that runs; 0: all clients are one."""
    _CURRENT.set(number)


def current_key_number() -> int:
    """Return that of the request whose handler calls this; 0 where there is none."""
    return _CURRENT.get()
