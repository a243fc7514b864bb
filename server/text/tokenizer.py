"""The model's tokenizer and its special tokens, from JSON files; never AutoTokenizer, which imports torch's world."""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as LibraryTokenizer

from ringserve.server.errors import RequestError, StartupError
from ringserve.server.text.detokenizer import Detokenizer, StreamDetokenizer, TableDetokenizer
from ringserve.server.text.token_names import TokenNames
from ringserve.server.text.token_table import make_tables

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NONE_SHOWN: frozenset[str] = frozenset()
MAX_TEXT_BYTES = 2**21  # the library frees tokens, one a byte at most, with the GIL held: so many take 0.1 s


def check_text_size(text: str, name: str, max_bytes: int = MAX_TEXT_BYTES) -> None:
    """Refuse a text whose tokens would hold everyone up.

    Args:
        text: It may hold lone surrogates.
        name: The field that it stands in.
        max_bytes: In UTF-8.

    Raises:
        RequestError: If it is longer.
    """
    num_bytes = len(text)  # at least
    if max_bytes / 4 < num_bytes <= max_bytes:
        num_bytes = len(text.encode(errors="surrogatepass"))
    if num_bytes > max_bytes:
        raise RequestError(f"{name} has {num_bytes} bytes or more: at most {max_bytes}", param=name)


class Tokenizer:
    """Text to token ids and back, for one model.

    Attributes:
        vocab_size: Ids that the tokenizer has; the model's vocabulary may be larger.
        eos_token_id: From tokenizer_config.json, or None.
        names: Of tokens in logprobs; `id_names`: the same by token id.
        longest_token: Characters of the longest token: a text of n characters has at least n / longest_token tokens.
    """

    def __init__(self, library: LibraryTokenizer, special_tokens: dict[str, str]) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._tables = {NONE_SHOWN: make_tables(library)}
        vocab = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.longest_token = max(map(len, vocab), default=1)
        self.special_tokens = special_tokens
        self.eos_token_id: int | None = vocab.get(special_tokens.get("eos_token", ""))
        self.names = TokenNames(self.bytes_of)
        self.id_names = TokenNames(self.bytes_of, as_ids=True)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load a tokenizer.json, and the tokenizer_config.json beside it if there is one.

        Raises:
            StartupError: If tokenizer.json is missing or broken.
        """
        if not path.is_file():
            raise StartupError(
                f"there is no {path}, and tokenizer.json is the only tokenizer format that is read: make one with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            library = LibraryTokenizer.from_file(str(path))
        except Exception as exc:  # the library raises Exception itself
            raise StartupError(f"{path} is no valid tokenizer.json: {exc}") from exc
        return cls(library, _special_tokens(read_json(path.with_name("tokenizer_config.json"))))

    def added_tokens(self) -> dict[int, str]:
        """Return the tokens beside those of the vocabulary proper, special ones and others, by their ids."""
        return {token_id: token.content for token_id, token in self._library.get_added_tokens_decoder().items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the text's token ids. Releases the GIL, which the library's `encode` holds: it may run on a thread."""
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Releases the GIL, so it may run on a thread."""
        (text,) = self._library.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Return each token as the vocabulary writes it, "" for ids that it lacks."""
        name = self._library.id_to_token
        return [name(token_id) or "" for token_id in token_ids]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that one token is, special or not; none for an id without a token.

        Raises:
            ValueError: If it can be no token id.
        """
        tables = self._tables[NONE_SHOWN]
        if tables is not None:
            return tables[False].bytes_of(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def special_token_id(self, text: str) -> int | None:
        """Return the id of the special token that is written so; None if it is text. Takes up to a millisecond."""
        added = self._library.get_added_tokens_decoder().items()
        return next((token_id for token_id, token in added if token.special and token.content == text), None)

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool, shown: frozenset[str] = NONE_SHOWN
    ) -> Detokenizer:
        """Return a new incremental detokenizer for the output of this prompt.

        Args:
            shown: Special tokens that are text even if the others are skipped; of few kinds, for each has its table.
        """
        if shown not in self._tables:
            self._tables[shown] = make_tables(self._library, shown)
        tables = self._tables[shown]
        if tables is not None:
            return TableDetokenizer(tables[skip_special_tokens], prompt_token_ids)
        return StreamDetokenizer(self._library, prompt_token_ids, skip_special_tokens=skip_special_tokens, shown=shown)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no such file.

    Raises:
        StartupError: If it is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as exc:
        raise StartupError(f"{path} is not a JSON object: {exc}") from exc


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
