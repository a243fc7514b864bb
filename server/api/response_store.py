"""Responses that clients may come back to: by id, or as the previous one of a conversation. In memory, bounded.

Everything is kept as encoded JSON: one object each, which the garbage collector need not look at. Loop thread only.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable
from typing import Any

import msgspec

from ringserve.server.errors import RequestError

MAX_STORED_BYTES = 256 << 20
_LARGEST_SHARE = 16  # of the bytes, for one response: one in so many parts

_encode = msgspec.json.encode


class _Output(msgspec.Struct):
    """The part of a response that the next one begins with."""

    output: list[dict[str, Any]]


class _Item(msgspec.Struct):
    """What names an item."""

    id: str


class _ItemsOfOutput(msgspec.Struct):
    """The same of a response's output."""

    output: list[_Item]


_decode_ids = msgspec.json.Decoder(_ItemsOfOutput).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_response = msgspec.json.Decoder(_Output).decode


class StoredResponse(msgspec.Struct, frozen=True, gc=False):
    """One response.

    Attributes:
        response: The response object.
        input_items: The items that it was generated from, those of the responses before it included.
        item_ids: Of items that came with it, by which requests may refer to them: ids that were made here, which nobody
            guesses and no client has chosen.
    """

    response: bytes
    input_items: bytes
    item_ids: tuple[str, ...] = ()

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
        self._holders: dict[str, str] = {}  # an item's id, and that of the response that it came with
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
        self._holders |= dict.fromkeys(stored.item_ids, response_id)
        self.num_bytes += stored.num_bytes
        while len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, which counts as a use of it; None if it is not there."""
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    def holders(self, item_ids: Iterable[str]) -> list[StoredResponse]:
        """Return the responses that items came with, each once, which counts as a use; unknown items are ignored."""
        response_ids = dict.fromkeys(self._holders[item_id] for item_id in item_ids if item_id in self._holders)
        return [stored for response_id in response_ids if (stored := self.get(response_id)) is not None]

    def delete(self, response_id: str) -> bool:
        """Drop a response; return whether it was there."""
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            self._holders.pop(item_id, None)
        return True


def output_ids(response: bytes) -> list[str]:
    """Return the ids of a response's output items."""
    return [item.id for item in _decode_ids(response).output]


def find_items(holders: list[StoredResponse], item_ids: Container[str]) -> dict[str, dict[str, Any]]:
    """Return by their ids those items that are in one of the responses. For a thread, where there are many.

    Raises:
        RequestError: If they have more bytes than a response may: a short request could fill the memory by them.
    """
    found: dict[str, dict[str, Any]] = {}
    num_bytes, most = 0, MAX_STORED_BYTES // _LARGEST_SHARE
    for stored in holders:
        for item in stored.conversation():
            if item["id"] in item_ids and item["id"] not in found:
                found[item["id"]] = item
                num_bytes += len(_encode(item))
                if num_bytes > most:
                    raise RequestError(f"input refers to items of more than {most} bytes: name fewer", param="input")
    return found


def encode_items(items: list[dict[str, Any]]) -> bytes:
    """Return items as a StoredResponse has them."""
    return _encode(items)
