"""Grammars that outputs have to follow: compiled by llguidance on threads, followed token by token on the loop's.

A text is compiled once, whoever asks for it, and kept while it is among the newest. Each sequence follows a copy of
its own, a GrammarMatcher, which lives with its request and so survives preemption. It gives a bit for each token that
may come next; engine/sampling/grammar_mask.py applies them.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ringserve.shm_transport.grammar_limits import GRAMMAR_LIMITS
from ringserve.shm_transport.messages import AddRequest

_NUM_THREADS = 2
_NUM_KEPT = 128  # compiled texts
_NO_WAY_ON = "NoExtension"  # the library's, also as a beginning


class GrammarError(Exception):
    """A grammar that does not compile, or that has become too complex for its limits on the way."""


class NoGrammarsError(Exception):
    """The model's tokenizer is of no use for grammars."""


class GrammarMatcher:
    """A request's Matcher: where it stands in its grammar. Loop thread only.

    Args:
        library: At the grammar's start; this one's own.
        end_bit: The token by which the library says that the grammar may end here.
        ends: The tokens that may come then, all of them special.
        num_mask_bytes: Of the masks that it fills; the same for all of one tokenizer.
    """

    __slots__ = ("_could_end", "_end_bit", "_library", "ends", "num_mask_bytes")

    def __init__(self, library: LLMatcher, *, end_bit: int, ends: Iterable[int], num_mask_bytes: int) -> None:
        self._library, self._end_bit, self.ends = library, end_bit, tuple(ends)
        self._could_end = False  # before the last token
        self.num_mask_bytes = num_mask_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the grammar is satisfied and admits no further token."""
        return self._library.is_stopped() and not self._library.is_error()

    @property
    def may_stop(self) -> bool:
        """Whether the output could end at the last token: it satisfies the grammar with it and without it."""
        return self._could_end and self._library.is_accepting()

    def fill(self, mask: NDArray[np.uint8]) -> None:
        """Write which tokens may come next: those that go on, and where the grammar may end those that end a request.

        Args:
            mask: [num_mask_bytes], a bit for each token, the lowest first.

        Raises:
            GrammarError: If a limit has been hit, now or when the last token was consumed.
        """
        self._library.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._library.is_error():
            raise GrammarError(_why_lost(self._library.get_error()))
        may_end = mask[self._end_bit >> 3] & (1 << (self._end_bit & 7))
        self._could_end = bool(may_end)
        if may_end:
            mask[self._end_bit >> 3] ^= may_end
            for token_id in self.ends:
                mask[token_id >> 3] |= 1 << (token_id & 7)

    def consume(self, token_id: int) -> None:
        """Go on by a token that `fill` has allowed. An error shows in the next `fill`."""
        if token_id not in self.ends:
            self._library.consume_token(token_id)


class CompiledGrammar:
    """A text's grammar at its start, from which every sequence gets a copy."""

    def __init__(self, library: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._library, self._tokenizer = library, tokenizer

    def matcher(self, params: AddRequest) -> GrammarMatcher:
        """Return a new matcher.

        Where the grammar may end, EOS and those stop tokens may come that are special. Other stop tokens are text: the
        grammar has to allow them, and they end the output only where it may end.
        """
        size, is_special = self._tokenizer.vocab_size, self._tokenizer.is_special_token
        stops = (params.eos_token_id, *params.stop_token_ids)
        ends = [token_id for token_id in stops if 0 <= token_id < size and is_special(token_id)]
        return GrammarMatcher(
            self._library.deep_copy(),
            end_bit=self._tokenizer.eos_token,
            ends=ends,
            num_mask_bytes=-(-size // 32) * 4,  # the library writes words of 32 bits
        )


class GrammarCompiler:
    """Compiles grammars on threads, for one model.

    Args:
        tokenizer_json: The model's; read at once, on a thread: it holds the GIL for 0.3 s, in which no stream goes on.
        vocab_size: The model's, of its logits.
    """

    def __init__(self, tokenizer_json: Path, vocab_size: int) -> None:
        self._tokenizer_json, self._vocab_size = tokenizer_json, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()  # the newest last
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._threads.submit(self._load_tokenizer)  # if it fails, it fails again for whoever has a grammar

    def compile(self, text: str) -> "Future[CompiledGrammar]":
        """Return a grammar that is, or will be, compiled; its result may be a GrammarError. Loop thread only."""
        future = self._compiled.pop(text, None) or self._threads.submit(self._compile, text)
        self._compiled[text] = future
        if len(self._compiled) > _NUM_KEPT:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, text: str) -> CompiledGrammar:
        tokenizer = self._load_tokenizer()
        library = LLMatcher(tokenizer, text, log_level=0, limits=self._limits)
        begun = library.deep_copy()
        if not begun.is_error():
            begun.compute_bitmask()  # the longest of all masks, for it builds what the others use: not in a step
        if begun.is_error():
            raise GrammarError(f"the grammar does not compile: {_first_line(begun.get_error())}")
        return CompiledGrammar(library, tokenizer)

    def _load_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            self._tokenizer = self._tokenizer or load_tokenizer(self._tokenizer_json, self._vocab_size)
            return self._tokenizer


class _TextTokenizer:
    """A tokenizer that has no text for special tokens: text that is spelled like one is spelled by others.

    The library asks it for the tokens of text that a grammar forces. The model's own would give the special token
    there, and the grammar, which wants text, could not go on.
    """

    def __init__(self, library: LLTokenizer) -> None:
        self._library = library
        ids = range(library.vocab_size)
        self.eos_token_id, self.bos_token_id = library.eos_token, None
        self.tokens = [library.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if library.is_special_token(token_id)]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return a text's tokens."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        token_ids = self._library.tokenize_str(text)
        if any(map(self._library.is_special_token, token_ids)):
            return self._library.greedy_tokenize(text)  # by the tokens' bytes, which text shares with no special token
        return token_ids


def load_tokenizer(path: Path, vocab_size: int) -> LLTokenizer:
    """Read a tokenizer.json for llguidance.

    Raises:
        NoGrammarsError: If it is missing or of a kind that llguidance does not know, or has no special token, by which
            the library could say that a grammar may end.
    """
    try:
        text = path.read_text("utf-8")
        added = json.loads(text).get("added_tokens", ())
        specials = [token["id"] for token in added if token.get("special")]
        size = max(vocab_size, 1 + max((token["id"] for token in added), default=-1))
        if specials:
            spelling = _TextTokenizer(LLTokenizer(text, n_vocab=size, eos_token=specials[0], slices=[]))
            return LLTokenizer(TokenizerWrapper(spelling), n_vocab=size, eos_token=specials[0])
    except (OSError, ValueError) as exc:
        raise NoGrammarsError(f"{path} cannot be read for grammars: {exc}") from exc
    raise NoGrammarsError(f"{path} has no special token, which grammars need to end")


def _why_lost(error: str) -> str:
    if error.startswith(_NO_WAY_ON):
        return "the grammar has come to where no text can follow: take out the part that admits none"
    return (
        f"the grammar has become too complex to be followed further ({_first_line(error)}): simplify it, with shorter "
        "repetitions or fewer alternatives"
    )


def _first_line(error: str) -> str:
    return error.partition("\n")[0][:500]
