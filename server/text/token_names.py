"""What tokens are called: their texts as JSON strings, by id, each made once, when it comes up."""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from ringserve.server.text.json_string import json_string

_encode = msgspec.json.encode
V = TypeVar("V")


class _Table(dict[int, V], Generic[V]):
    """Token id -> something made once, when the id comes up."""

    def __init__(self, make: Callable[[int], V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> V:
        value = self[token_id] = self._make(token_id)
        return value


class TokenNames:
    """How tokens are shown, by id.

    A token's name is its text, or "bytes:\\xf0\\x9f" where its bytes are no text on their own, as OpenAI writes it.

    Args:
        bytes_of: Returns a token's raw bytes.
        as_ids: Name tokens `token_id:7`; their bytes stay.

    Attributes:
        strings: The name as a JSON string.
        keys: The same and a colon.
        heads: What comes before a logprob in a chat entry.
        tails: What comes after it: the entry is still open.
        num_characters: That begin in the token.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], *, as_ids: bool = False) -> None:
        def string(token_id: int) -> bytes:
            return json_string(f"token_id:{token_id}" if as_ids else _text(bytes_of(token_id)))

        self.strings = _Table(string)
        self.keys = _Table(lambda token_id: self.strings[token_id] + b":")
        self.heads = _Table(lambda token_id: b'{"token":%b,"logprob":' % self.strings[token_id])
        self.tails = _Table(lambda token_id: b',"bytes":%b' % _encode(list(bytes_of(token_id))))
        self.num_characters = _Table(lambda token_id: sum(byte & 0xC0 != 0x80 for byte in bytes_of(token_id)))


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
