"""A tokenizer with a token for each byte, for tests of grammars."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BYTES = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))  # as byte-level tokenizers write them
NAMES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def byte_tokenizer(vocab: Sequence[str] = BYTES, special: Sequence[str] = ("<end>",)) -> Tokenizer:
    """Return one without merges; special tokens that the vocabulary lacks come behind it."""
    tokenizer = Tokenizer(models.BPE(vocab={text: n for n, text in enumerate(vocab)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def fields(**given: Any) -> SimpleNamespace:
    """Return a request's fields that ask for a form; None: not given."""
    return SimpleNamespace(**dict.fromkeys(NAMES) | given)
