"""Whether llguidance can follow a grammar: what is wrong with it shows in its text, or in the first steps. Any process.

Takes as long as the grammar wants, up to seconds: check_process.py runs it where it holds nobody up.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import islice

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ringserve.shm_transport.grammar_limits import GRAMMAR_LIMITS

LIMITS = LLParserLimits(**GRAMMAR_LIMITS)
_NUM_TRIED_TOKENS = 64
_NO_INK = frozenset((*b" \t\r\n", 256))  # of the byte tokenizer: they lead nowhere, or end
_NEEDS_TOKENIZER = "no tokenizer"


class ByteTokenizer:
    """A tokenizer of a token for each byte, for what needs no other: as small as it can be."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids: Sequence[int] = (256,)
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        """Return a text's tokens."""
        return list(text if isinstance(text, bytes) else text.encode())


class _NamedTokens(ByteTokenizer):
    """The same under a model's ids, with its added tokens: all that grammars can name.

    The library reads a whole tokenizer with the GIL held: so long that every stream would stop. These are few.
    """

    def __init__(self, added: Mapping[int, str], vocab_size: int) -> None:
        data, ids = iter(range(256)), range(vocab_size)
        self.special_token_ids = [*added]
        self.tokens = [added[i].encode() if i in added else bytes([*islice(data, 1)]) for i in ids]
        self.eos_token_id = next(iter(added), 0)
        self._byte_ids = [i for i in ids if i not in added]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return a text's tokens."""
        return [self._byte_ids[byte] for byte in super().__call__(text)]


class GrammarCheck:
    """Checks for one model.

    Args:
        added_tokens: The model's, by id.
        vocab_size: Ids that its tokenizer has.
    """

    def __init__(self, added_tokens: Mapping[int, str], vocab_size: int) -> None:
        self._bytes = LLTokenizer(TokenizerWrapper(ByteTokenizer()))
        self._named_tokens = LLTokenizer(TokenizerWrapper(_NamedTokens(added_tokens, vocab_size)))

    def error_of(self, grammar: str) -> str:
        """Return the library's words on why the engine could not follow a grammar; "" if it can."""
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
        if is_wrong:
            return messages[0]
        names_tokens = any(message.startswith(_NEEDS_TOKENIZER) for message in messages)
        return begin(grammar, self._named_tokens if names_tokens else self._bytes)


def begin(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return why a grammar cannot be followed, "" if it can: what is too complex shows in the first steps at random."""
    matcher, chance = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS), random.Random(0)
    for _ in range(_NUM_TRIED_TOKENS if tokenizer.vocab_size == len(ByteTokenizer.tokens) else 1):  # else far slower
        mask = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = [token_id for token_id in range(tokenizer.vocab_size) if mask >> token_id & 1]
        inked = [token_id for token_id in allowed if token_id not in _NO_INK] or allowed
        if not inked:
            break
        matcher.consume_token(chance.choice(inked))
    return matcher.get_error() if matcher.is_error() else ""
