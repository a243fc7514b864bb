"""Finds and checks the grammars of requests before anything is generated, on a thread of its own.

A hostile grammar keeps nobody waiting but other requests with grammars: its text is bounded, llguidance's limits bound
its time and memory, and the work is done without the GIL.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ringserve.server.errors import RequestError
from ringserve.server.grammar.errors import explain
from ringserve.server.grammar.structured_output import Grammar, StructuredFields, field_of, find_grammar, has_structure
from ringserve.server.text.tokenizer import Tokenizer

_NUM_KEPT = 64  # texts that are known to be good
_NUM_TRIED_TOKENS = 64
_NO_INK = frozenset((*b" \t\r\n", 256))  # of the byte tokenizer: they lead nowhere, or end
_NEEDS_TOKENIZER = "no tokenizer"
_LIMITS = LLParserLimits(max_lexer_states=20_000, max_items_in_row=4_100, verbose_errors=False)  # the engine's


class _Bytes:
    """A tokenizer of a token for each byte, for what needs no other: as small as it can be."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids: Sequence[int] = (256,)
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        """Return a text's tokens."""
        return list(text if isinstance(text, bytes) else text.encode())


class _NamedTokens(_Bytes):
    """The same under a model's ids, with its added tokens: all that grammars can name.

    The library reads a whole tokenizer with the GIL held: so long that every stream would stop. These are few.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added, data = tokenizer.added_tokens(), iter(range(256))
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [*added]
        self.tokens = [added[i].encode() if i in added else bytes([*islice(data, 1)]) for i in ids]
        self.eos_token_id = next(iter(added), 0)
        self._byte_ids = [i for i in ids if i not in added]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return a text's tokens."""
        return [self._byte_ids[byte] for byte in super().__call__(text)]


class GrammarChecker:
    """For one model. Loop thread only, but for what it does on its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._named_tokens: LLTokenizer | None = None
        self._bytes = LLTokenizer(TokenizerWrapper(_Bytes()))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        self._good: OrderedDict[str, None] = OrderedDict()  # the newest last

    async def find(self, fields: StructuredFields) -> str:
        """Return the grammar that a request asks for, checked; "" for plain text.

        Raises:
            RequestError: Naming the field at fault.
        """
        if not has_structure(fields):
            return ""
        grammar = await asyncio.get_running_loop().run_in_executor(self._thread, find_grammar, fields)
        if grammar is None:
            return ""
        await self.check(grammar)
        return grammar

    async def check(self, grammar: str) -> None:
        """Return if the engine can follow a grammar.

        Raises:
            RequestError: If it cannot, naming the field that the grammar comes from.
        """
        if grammar not in self._good:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._check, grammar)
            if len(self._good) >= _NUM_KEPT:
                self._good.popitem(last=False)
            self._good[str(grammar)] = None

    def _check(self, grammar: str) -> None:
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=_LIMITS)
        error = messages[0] if is_wrong else ""
        if not is_wrong:
            names_tokens = any(message.startswith(_NEEDS_TOKENIZER) for message in messages)
            error = begin(grammar, self._with_named_tokens() if names_tokens else self._bytes)
        if error:
            for part in grammar.parts() if isinstance(grammar, Grammar) else ():
                self._check(part)
            field = field_of(grammar)
            raise RequestError(f"{field}: {explain(error)}", param=field)

    def _with_named_tokens(self) -> LLTokenizer:
        """Return the tokenizer for grammars that name tokens."""
        self._named_tokens = self._named_tokens or LLTokenizer(TokenizerWrapper(_NamedTokens(self._tokenizer)))
        return self._named_tokens


def begin(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return why a grammar cannot be followed, "" if it can: what is too complex shows in the first steps at random."""
    matcher, chance = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS), random.Random(0)
    for _ in range(_NUM_TRIED_TOKENS if tokenizer.vocab_size == len(_Bytes.tokens) else 1):  # else far slower
        mask = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = [token_id for token_id in range(tokenizer.vocab_size) if mask >> token_id & 1]
        inked = [token_id for token_id in allowed if token_id not in _NO_INK] or allowed
        if not inked:
            break
        matcher.consume_token(chance.choice(inked))
    return matcher.get_error() if matcher.is_error() else ""
