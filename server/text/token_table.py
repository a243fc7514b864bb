"""What each token id contributes to the text, looked up instead of decoded.

For byte-level BPE and for SentencePiece-with-byte-fallback tokenizers the text is the joined bytes of the tokens,
decoded as UTF-8, perhaps with one leading space stripped. Tokenizers of other kinds have no table.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from tokenizers import Tokenizer

from ringserve.server.text.json_string import json_string

_MAX_TOKEN_ID = 2**31 - 1
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

TokenBytes = Callable[[str], bytes]


class _ReadyTable(dict[int, "tuple[str, bytes] | None"]):
    """Token id -> its text and that as a JSON string; None for tokens without text, or with half a character."""

    def __init__(self, table: "TokenTable") -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> "tuple[str, bytes] | None":
        piece = self._table[token_id]
        entry = (piece, json_string(piece)) if piece and isinstance(piece, str) else None
        self[token_id] = entry
        return entry


class TokenTable(dict[int, "str | bytes"]):
    """Token id -> its text where that is valid UTF-8 on its own, else its bytes; filled as ids come up.

    Attributes:
        ready: Token id -> text and JSON string, where both are certain from the one token.
        strips_leading_space: Whether decoding strips one space at the absolute start of prompt and output.
    """

    def __init__(
        self, tokenizer: Tokenizer, to_bytes: TokenBytes, *, skipped: frozenset[int], strips_leading_space: bool
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._to_bytes = to_bytes
        self._skipped = skipped
        self.strips_leading_space = strips_leading_space
        self.ready = _ReadyTable(self)

    def __missing__(self, token_id: int) -> "str | bytes":
        """Look an id up in the tokenizer; one that it does not have (a padded vocabulary) is no text.

        Raises:
            ValueError: If it can be no token id at all.
        """
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            raise ValueError(f"token id {token_id} is not within 0 and {_MAX_TOKEN_ID}")
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        data = b"" if token is None else self._to_bytes(token)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes."""
        piece = self[token_id]
        return piece.encode() if isinstance(piece, str) else piece


class _Spec(msgspec.Struct):
    """What is read of tokenizer.json: as plain JSON its vocabulary would be 30 MB of objects."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] | None = None


def make_tables(tokenizer: Tokenizer, shown: frozenset[str] = frozenset()) -> "tuple[TokenTable, TokenTable] | None":
    """Return the tables that keep and that skip special tokens; None if the tokenizer's decoder is of another kind.

    `shown` are special tokens that the second table keeps too.
    """
    spec = msgspec.json.decode(tokenizer.to_str(), type=_Spec)
    rule = _decoding_rule(spec.decoder)
    if rule is None:
        return None
    to_bytes, strips = rule
    added = [token for token in spec.added_tokens or () if token["special"]]
    special = frozenset(token["id"] for token in added if token["content"] not in shown)
    keeping = TokenTable(tokenizer, to_bytes, skipped=frozenset(), strips_leading_space=strips)
    skipping = TokenTable(tokenizer, to_bytes, skipped=special, strips_leading_space=strips)
    return keeping, skipping


def _decoding_rule(decoder: "dict[str, Any] | None") -> "tuple[TokenBytes, bool] | None":
    """Return how a decoder turns one token into bytes, and whether it strips one leading space of the whole."""
    steps = _flatten(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level_bytes, False
    return _sentencepiece_rule(steps)


def _flatten(decoder: "dict[str, Any] | None") -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _sentencepiece_rule(steps: list[dict[str, Any]]) -> "tuple[TokenBytes, bool] | None":
    """Accept Replace* ByteFallback Fuse [Strip one space at the start]; None for anything else."""
    replaced: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replaced.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps = steps[1:]
    kinds = [step["type"] for step in steps]
    if kinds[:2] != ["ByteFallback", "Fuse"] or kinds[2:] not in ([], ["Strip"]):
        return None
    if kinds[2:] and (steps[2]["content"], steps[2]["start"], steps[2]["stop"]) != (" ", 1, 0):
        return None

    def to_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes((int(match[1], 16),)) if match else token.encode()

    return to_bytes, bool(kinds[2:])


def _byte_alphabet() -> dict[str, int]:
    """Return the letters that byte-level BPE writes bytes as.

    Source: GPT-2's byte encoder, Radford et al. 2019: printable Latin-1 stands for itself, the rest from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:  # an added token with letters outside the alphabet stands for itself
        return token.encode()
