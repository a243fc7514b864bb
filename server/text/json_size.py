"""How much a JSON text holds, found before it is decoded: that holds the GIL, millions of values stop the loop."""

import numpy as np

from ringserve.server.errors import RequestError

MAX_CONTAINERS = 65_536  # objects and lists: so many take 5 ms to decode
MAX_MEMBERS = 131_072  # of objects: 20 ms
MAX_VALUES = 2**20  # numbers and texts beside each other: up to 60 ms; prompts of few models have as many


def check_json_size(text: bytes, name: str, *, param: str | None = None) -> None:
    """Return if a JSON text can be decoded without holding others up. A long one takes milliseconds: for a thread.

    Args:
        text: JSON; what is none is for the decoder to refuse.
        name: What the error calls it.
        param: The field at fault.

    Raises:
        RequestError: Saying what there is too much of.
    """
    if len(text) <= MAX_CONTAINERS:  # each takes a byte at least
        return
    for what, count, limit in zip(
        ("objects and lists", "members of objects", "values"),
        _count(text), (MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES), strict=True,
    ):  # fmt: skip
        if count > limit:
            raise RequestError(f"{name} has {count} {what}: at most {limit}", param=param)


def _count(text: bytes) -> tuple[int, int, int]:
    """Return the brackets, colons and commas outside strings. numpy counts without the GIL."""
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in text else text
    found = np.frombuffer(plain, np.uint8)
    is_outside = np.bitwise_xor.accumulate((found == ord('"')).view(np.uint8)) == 0
    found = found[is_outside]
    counts = [int(np.count_nonzero(found == ord(each))) for each in "[{:,"]
    return counts[0] + counts[1], counts[2], counts[3]
