"""Shares the event loop's turns among connections that all send at once.

A thousand requests that arrive together would all be parsed, and begun, in one turn: whoever streams meanwhile would
stand still for a fifth of a second. Loop thread only.
"""

import asyncio
from collections import deque
from collections.abc import Callable

_PIECES = 4  # taken up in a turn: a request costs a fifth to a third of a millisecond


class Turns:
    """Who receives something takes it up at once while the turn has room, else in one of the next ones, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_taken = 0  # in this turn

    def try_take(self) -> bool:
        """Whether something that was received may be taken up now; if not, `wait` with it."""
        if self._num_taken == _PIECES or self._waiting:
            return False
        if not self._num_taken:
            asyncio.get_running_loop().call_soon(self._begin)
        self._num_taken += 1
        return True

    def wait(self, take_up: Callable[[], None]) -> None:
        """Have something taken up in a later turn; it must not raise."""
        self._waiting.append(take_up)

    def _begin(self) -> None:
        """Begin a turn, with those who have waited longest."""
        self._num_taken = min(len(self._waiting), _PIECES)
        if self._num_taken:
            asyncio.get_running_loop().call_soon(self._begin)
        for _ in range(self._num_taken):
            self._waiting.popleft()()
