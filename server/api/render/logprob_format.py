"""How logprobs look in answers: each token's name and raw bytes by table, never decoded one by one."""

from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringserve.server.generation.outputs import TokenLogprobs
from ringserve.server.generation.scored_rows import json_number, json_numbers
from ringserve.server.text.token_names import TokenNames
from ringserve.shm_transport.records import DataContent

_COMPLETION_FORM = b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}'
_encode = msgspec.json.encode


class ChatLogprobs:
    """`logprobs` of /v1/chat/completions: the k most likely tokens beside each sampled one."""

    def __init__(self, names: TokenNames) -> None:
        self._head, self._tail = names.heads.__getitem__, names.tails.__getitem__

    def to_json(self, index: int, logprobs: TokenLogprobs) -> bytes:  # noqa: ARG002  # the protocol's
        """Return the `logprobs` object."""
        return b'{"content":%b,"refusal":null}' % self.content_json(logprobs)

    def token_json(self, index: int, token_ids: list[int], numbers: list[bytes]) -> bytes:  # noqa: ARG002
        """Return the `logprobs` object of one token."""
        return b'{"content":[%b],"refusal":null}' % self._entry(token_ids, numbers)

    def content_json(self, logprobs: TokenLogprobs) -> bytes:
        """Return the list of entries, one a token."""
        token_ids, numbers = logprobs.token_ids, json_numbers(logprobs.logprobs)
        return b"[%b]" % b",".join([self._entry(token_ids[token], numbers[token]) for token in _tokens(logprobs)])

    def _entry(self, token_ids: list[int], numbers: list[bytes]) -> bytes:
        """Return one token's entry, with those of the most likely ones."""
        own, *top = map(add, map(add, map(self._head, token_ids), numbers), map(self._tail, token_ids))
        return b'%b,"top_logprobs":%b}' % (own, b"[%b}]" % b"},".join(top) if top else b"[]")


class CompletionLogprobs:
    """`logprobs` of /v1/completions: parallel lists, and an object of the most likely tokens and the sampled one."""

    def __init__(self, names: TokenNames) -> None:
        self._strings, self._num_characters, self._key = names.strings, names.num_characters, names.keys.__getitem__
        self._offsets: dict[int, int] = {}  # choice -> characters of its text so far

    def to_json(self, index: int, logprobs: TokenLogprobs) -> bytes:
        """Return the `logprobs` object."""
        token_ids, numbers = logprobs.token_ids, json_numbers(logprobs.logprobs)
        sampled = token_ids[:: logprobs.width]
        starts = [*accumulate(map(self._num_characters.__getitem__, sampled), initial=self._offsets.get(index, 0))]
        self._offsets[index] = starts.pop()
        names = [self._strings[token_id] for token_id in sampled]
        top = [self._top(token_ids[token], numbers[token]) for token in _tokens(logprobs)]
        lists = map(b",".join, (numbers[:: logprobs.width], names, top))
        return _COMPLETION_FORM % (_encode(starts)[1:-1], *lists)

    def token_json(self, index: int, token_ids: list[int], numbers: list[bytes]) -> bytes:
        """Return the `logprobs` object of one token."""
        sampled = token_ids[0]
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + self._num_characters[sampled]
        return _COMPLETION_FORM % (b"%d" % start, numbers[0], self._strings[sampled], self._top(token_ids, numbers))

    def _top(self, token_ids: list[int], numbers: list[bytes]) -> bytes:
        """Return one token's object: the sampled token and the most likely ones, each once."""
        if numbers[0] == b"null":
            return b"null"
        has_twice = token_ids[0] in token_ids[1:]  # the sampled token is among the most likely
        keys = [*map(self._key, token_ids[has_twice:])]
        if len(set(keys)) == len(keys):
            return b"{%b}" % b",".join(map(add, keys, numbers[has_twice:]))
        named: dict[bytes, bytes] = {}  # different tokens can have one name: the first, so the likelier, is kept
        for key, number in zip(map(self._key, token_ids), numbers, strict=True):
            named.setdefault(key, number)
        return b"{%b}" % b",".join(map(add, named.keys(), named.values()))


def _tokens(logprobs: TokenLogprobs) -> list[slice]:
    """Return where each token's entries are."""
    width = logprobs.width
    return [slice(start, start + width) for start in range(0, len(logprobs.token_ids), width)]


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
        entries.setdefault(token_id, form % (token_id, json_number(value), place, names.strings[token_id]))
    return b"{%b}" % b",".join(entries.values())
