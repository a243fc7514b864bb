"""How logprobs look in answers: each token's name and raw bytes by table, never decoded one by one."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from server.json_string import json_string
from server.outputs import TokenLogprobs
from shm_transport.records import DataContent

_FLOOR = -9999.0  # JSON has no -Infinity
_encode = msgspec.json.encode


class TokenName(NamedTuple):
    """A token as logprobs show it."""

    text: str  # "bytes:\\xf0\\x9f" where its bytes are no text on their own, as OpenAI writes it
    name: bytes  # JSON string
    key: bytes  # `name` and a colon
    head: bytes  # of a chat entry: `{"token":...,"logprob":`
    tail: bytes  # of a chat entry: `,"bytes":[...]`, still open
    num_characters: int  # that begin in this token


class TokenNames(dict[int, TokenName]):
    """Token id -> its name; filled as ids come up.

    Args:
        bytes_of: Returns a token's raw bytes.
        as_ids: Name tokens `token_id:7`; their bytes stay.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], *, as_ids: bool = False) -> None:
        super().__init__()
        self._bytes_of = bytes_of
        self._as_ids = as_ids

    def __missing__(self, token_id: int) -> TokenName:
        """Make the name of a token."""
        data = self._bytes_of(token_id)
        text = f"token_id:{token_id}" if self._as_ids else _text(data)
        name = json_string(text)
        num_characters = sum(byte & 0xC0 != 0x80 for byte in data)
        head, tail = b'{"token":%b,"logprob":' % name, b',"bytes":%b' % _encode(list(data))
        entry = self[token_id] = TokenName(text, name, name + b":", head, tail, num_characters)
        return entry


class ChatLogprobs:
    """`logprobs` of /v1/chat/completions: the k most likely tokens beside each sampled one."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def to_json(self, index: int, logprobs: TokenLogprobs) -> bytes:  # noqa: ARG002  # the protocol's
        """Return the `logprobs` object."""
        return b'{"content":%b,"refusal":null}' % self.content_json(logprobs)

    def content_json(self, logprobs: TokenLogprobs) -> bytes:
        """Return the list of entries, one a token."""
        width, names = logprobs.width, self._names
        numbers = _numbers(logprobs.logprobs)
        named = [names[token_id] for token_id in logprobs.token_ids]
        parts = [name.head + number + name.tail for name, number in zip(named, numbers, strict=True)]
        return b"[%b]" % b",".join([_chat_entry(parts[start : start + width]) for start in range(0, len(parts), width)])


class CompletionLogprobs:
    """`logprobs` of /v1/completions: parallel lists, and an object of the most likely tokens and the sampled one."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offsets: dict[int, int] = {}  # choice -> characters of its text so far

    def to_json(self, index: int, logprobs: TokenLogprobs) -> bytes:
        """Return the `logprobs` object."""
        width, table = logprobs.width, self._names
        names = [table[token_id] for token_id in logprobs.token_ids]
        numbers = _numbers(logprobs.logprobs)
        sampled = names[::width]
        ends = [*accumulate([name.num_characters for name in sampled], initial=self._offsets.get(index, 0))]
        self._offsets[index] = ends.pop()
        top = [_completion_top(names[start : start + width], numbers[start : start + width])
               for start in range(0, len(names), width)]  # fmt: skip
        return b'{"text_offset":%b,"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}' % (
            _encode(ends), b",".join(numbers[::width]), b",".join([name.name for name in sampled]), b",".join(top),
        )  # fmt: skip


def _chat_entry(parts: list[bytes]) -> bytes:
    """Join the sampled token's part and those of the most likely ones, all still open."""
    listed = b"[%b}]" % b"},".join(parts[1:]) if len(parts) > 1 else b"[]"
    return b'%b,"top_logprobs":%b}' % (parts[0], listed)


def _completion_top(names: list[TokenName], numbers: list[bytes]) -> bytes:
    if numbers[0] == b"null":
        return b"null"
    parts = dict.fromkeys([name.key + number for name, number in zip(names, numbers, strict=True)])
    if len({name.key for name in names}) < len(parts):  # different tokens can have one name; the likelier is kept
        likelier: dict[bytes, bytes] = {}
        for name, number in zip(names, numbers, strict=True):
            likelier.setdefault(name.key, name.key + number)
        parts = dict.fromkeys(likelier.values())
    return b"{%b}" % b",".join(parts)


class PromptLogprobs(NamedTuple):
    """Logprobs of a prompt's tokens but the first."""

    token_ids: NDArray[np.int32]  # [num_prompt_tokens - 1, 1 + k]: the prompt's own token, then the k most likely
    logprobs: NDArray[np.float32]  # like token_ids
    ranks: NDArray[np.int32]  # [num_prompt_tokens - 1], of the prompt's own token

    @classmethod
    def of(cls, arrays: dict[DataContent, NDArray[Any]]) -> "PromptLogprobs | None":
        """Return those among a request's arrays, or None if there are none."""
        if DataContent.PROMPT_RANKS not in arrays:
            return None
        return cls(
            arrays[DataContent.PROMPT_TOKEN_IDS],
            arrays[DataContent.PROMPT_LOGPROBS],
            arrays[DataContent.PROMPT_RANKS],
        )

    def as_output(self, first_token_id: int, num_logprobs: int) -> TokenLogprobs:
        """Return them as if the prompt were output, without a logprob for its first token."""
        width = 1 + num_logprobs
        ids, values = self.token_ids[:, :width].ravel().tolist(), self.logprobs[:, :width].ravel().tolist()
        ranks = [0, *self.ranks.tolist()]
        return TokenLogprobs(width, [first_token_id] * width + ids, [None] * width + values, ranks)

    def to_json(self, num_logprobs: int, names: TokenNames) -> bytes:
        """Return vLLM's `prompt_logprobs`: null for the first token, then an object by token id for each."""
        ids, values = self.token_ids[:, : 1 + num_logprobs], self.logprobs[:, : 1 + num_logprobs]
        rows = zip(ids.tolist(), values.tolist(), self.ranks.tolist(), strict=True)
        return b"[%b]" % b",".join([b"null", *[_by_token_id(*row, names) for row in rows]])


def _by_token_id(ids: list[int], values: list[float], rank: int, names: TokenNames) -> bytes:
    form = b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'
    ranks = [rank, *range(1, len(ids))]
    entries: dict[int, bytes] = {}
    for token_id, value, place in zip(ids, values, ranks, strict=True):
        entries.setdefault(token_id, form % (token_id, _number(value), place, names[token_id].name))
    return b"{%b}" % b",".join(entries.values())


def _numbers(values: Sequence[float | None]) -> list[bytes]:
    """Return each as JSON; encoded at once they take a fifth of the time of `repr` for each."""
    data = _encode(values)
    # With None, NaN or an infinity there is a null.
    if values and b"n" not in data and min(cast("Sequence[float]", values)) > _FLOOR:
        return data[1:-1].split(b",")
    return [_number(value) for value in values]


def _number(value: float | None) -> bytes:
    if value is None:
        return b"null"
    return _encode(value) if value > _FLOOR else b"-9999.0"  # the comparison is false for NaN too


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
