"""Finds and checks the grammars of requests before anything is generated, on a thread of its own.

A hostile grammar keeps nobody waiting but other requests with grammars: its text is bounded, llguidance's limits bound
its time and memory, and the work is done without the GIL.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.errors import RequestError
from server.structured_output import Grammar, StructuredFields, find_grammar, has_structure
from server.tokenizer import Tokenizer

_NUM_KEPT = 64  # texts that are known to be good
_MAX_MESSAGE_CHARS = 400
_NEEDS_TOKENIZER = "no tokenizer"
_LIMITS = LLParserLimits(verbose_errors=False)


class GrammarChecker:
    """For one model. Loop thread only, but for what it does on its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._library_tokenizer: LLTokenizer | None = None
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
        is_wrong, messages = validate(grammar)
        if not is_wrong and any(message.startswith(_NEEDS_TOKENIZER) for message in messages):
            # It names special tokens; no others need the 50 MB.
            self._library_tokenizer = self._library_tokenizer or LLTokenizer(self._tokenizer.definition())
            is_wrong, messages = validate(grammar, self._library_tokenizer)
        if is_wrong:
            field = grammar.field if isinstance(grammar, Grammar) else "grammar"
            raise RequestError(f"{field}: {' '.join(messages[0].split())[:_MAX_MESSAGE_CHARS]}", param=field)


def validate(grammar: str, tokenizer: LLTokenizer | None = None) -> tuple[bool, list[str]]:
    """Return whether a grammar is wrong, and why; if it is not, what the library has to remark."""
    return LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=_LIMITS)
