"""Shares the event loop's turns among connections that all come, or send, at once.

A thousand requests that arrive together would all be parsed, and begun, in one turn: whoever streams meanwhile would
stand still for a fifth of a second. And a connection that is not accepted yet waits for what every turn takes up: who
asks /health on a new one stands behind a thousand others. Loop thread only.
"""

import asyncio
from collections import deque
from collections.abc import Callable

_PIECES = 4  # taken up in a turn: a request costs a fifth to a third of a millisecond
_PIECES_BESIDE_NEWCOMERS = 1  # while connections come in


class Turns:
    """Who receives something takes it up at once while the turn has room, else in one of the next ones, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._room = _PIECES  # that are left of this turn
        self._has_newcomers = False
        self._is_next_begun = False

    def note_newcomer(self) -> None:
        """Say that a connection was accepted: more may wait for it."""
        self._has_newcomers = True
        self._begin_next()

    def try_take(self) -> bool:
        """Whether something that was received may be taken up now; if not, `wait` with it."""
        if not self._room or self._waiting:
            return False
        self._room -= 1
        self._begin_next()
        return True

    def wait(self, take_up: Callable[[], None]) -> None:
        """Have something taken up in a later turn; it must not raise."""
        self._waiting.append(take_up)
        self._begin_next()

    def _begin_next(self) -> None:
        if not self._is_next_begun:
            self._is_next_begun = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin a turn, with those who have waited longest."""
        self._is_next_begun = False
        self._room = _PIECES_BESIDE_NEWCOMERS if self._has_newcomers else _PIECES
        self._has_newcomers = False
        num_taken = min(len(self._waiting), self._room)
        if num_taken:
            self._room -= num_taken
            self._begin_next()
        for _ in range(num_taken):
            self._waiting.popleft()()
