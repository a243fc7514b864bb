"""Logprobs as JSON numbers, made for a whole record at once."""

import functools
from collections.abc import Sequence

import msgspec

from ringserve.shm_transport.step_ring import Logprobs

_FLOOR = -9999.0  # JSON has no -Infinity
_encode = msgspec.json.encode


class ScoredRows:
    """A record's logprobs, and the same as JSON numbers, which are made for all rows at once when a stream needs them.

    Attributes:
        columns: The record's.
    """

    def __init__(self, columns: Logprobs) -> None:
        self.columns = columns

    @functools.cached_property
    def numbers(self) -> list[bytes]:
        """Like `columns.logprobs`."""
        return json_numbers(self.columns.logprobs)


def json_numbers(values: Sequence[float | None]) -> list[bytes]:
    """Return each as JSON; encoded at once they take a fifth of the time of `repr` for each."""
    data = _encode(values)
    # With None, NaN or an infinity there is a null.
    if values and b"n" not in data and min(values) > _FLOOR:  # type: ignore[type-var, operator]
        return data[1:-1].split(b",")
    return [json_number(value) for value in values]


def json_number(value: float | None) -> bytes:
    """Return a logprob as JSON."""
    if value is None:
        return b"null"
    return _encode(value) if value > _FLOOR else b"-9999.0"  # the comparison is false for NaN too
