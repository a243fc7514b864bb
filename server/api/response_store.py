"""Responses that clients may come back to: by id, or as the previous one of a conversation. In memory, bounded.

Everything is kept as encoded JSON: one object each, which the garbage collector need not look at. Loop thread only.
"""

from collections import OrderedDict
from typing import Any

import msgspec

MAX_STORED_BYTES = 256 << 20
_LARGEST_SHARE = 16  # of the bytes, for one response: one in so many parts

_encode = msgspec.json.encode


class _Output(msgspec.Struct):
    """The part of a response that the next one begins with."""

    output: list[dict[str, Any]]


_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_response = msgspec.json.Decoder(_Output).decode


class StoredResponse(msgspec.Struct, frozen=True, gc=False):
    """One response.

    Attributes:
        response: The response object.
        input_items: The items that it was generated from, those of the responses before it included.
    """

    response: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        """What it counts for the store's limit."""
        return len(self.response) + len(self.input_items)

    def items(self) -> list[dict[str, Any]]:
        """Return the items that it was generated from."""
        return _decode_items(self.input_items)

    def conversation(self) -> list[dict[str, Any]]:
        """Return what the next response of the conversation begins with: those items, then the output."""
        return self.items() + _decode_response(self.response).output


class ResponseStore:
    """The newest responses by use: those not asked for the longest go first.

    A response of more than a sixteenth of the bytes is not kept: a few large ones would push out everybody else's.

    Args:
        max_responses: Most that are kept; 0 keeps none.
        max_bytes: Most that they may hold together.
    """

    def __init__(self, max_responses: int = 1024, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self._responses)

    @property
    def is_enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_responses > 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response; drop the least recently used ones beyond the limits."""
        self.delete(response_id)
        if stored.num_bytes > self._max_bytes // _LARGEST_SHARE:
            return
        self._responses[response_id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
            _, dropped = self._responses.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, which counts as a use of it; None if it is not there."""
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    def delete(self, response_id: str) -> bool:
        """Drop a response; return whether it was there."""
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        return True


def encode_items(items: list[dict[str, Any]]) -> bytes:
    """Return items as a StoredResponse has them."""
    return _encode(items)
