"""Tokens to text under every grouping and output kind: cases from public bug reports and our own of each kind.

cases.json holds pieces, not ids: each case gets a tiny tokenizer of its own. The tests stand where the engine does:
they make the step records, and apply what the engine decides (EOS, stop token ids, max_tokens).
"""

import json
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from ringserve.server.errors import EngineGenerateError
from ringserve.server.generation.collector import RequestOutputCollector
from ringserve.server.generation.input_processor import ProcessedRequest
from ringserve.server.generation.output_processor import OutputProcessor
from ringserve.server.generation.outputs import CompletionOutput, OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.text.tokenizer import Tokenizer
from ringserve.shm_transport.records import FinishReason
from ringserve.shm_transport.ring import RecordHeader
from ringserve.shm_transport.step_ring import Logprobs, StepRecord

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
GROUPINGS = ([1], [2], [3], [1, 2], [10**6])  # tokens in each step, in turn
EOS = "<|eos|>"
Piece = dict[str, Any]


@dataclass
class Seen:
    """What one sequence's consumer saw."""

    outputs: list[CompletionOutput] = field(default_factory=list)
    error: Exception | None = None

    @property
    def deltas(self) -> list[str]:
        return [output.text for output in self.outputs]

    @property
    def last(self) -> CompletionOutput:
        return self.outputs[-1]


class TinyTokenizer:
    """A tokenizer whose vocabulary is a case's pieces."""

    def __init__(self, kind: str, pieces: Sequence[Piece]) -> None:
        plain = [_spelling(kind, piece) for piece in pieces if piece.keys() & {"hex", "text", "sp"}]
        vocab = {token: n for n, token in enumerate(dict.fromkeys(["unk", *plain]))}
        library = LibraryTokenizer(models.WordLevel(vocab, unk_token="unk"))
        library.decoder = _decoder(kind)
        special = [piece["special"] for piece in pieces if "special" in piece]
        library.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys([EOS, *special])])
        library.add_tokens([AddedToken(piece["added"], normalized=False) for piece in pieces if "added" in piece])
        self.kind = kind
        self.hf = library
        self.server = Tokenizer(library, {})
        self.eos_id = self.id_of({"eos": True})

    def id_of(self, piece: Piece) -> int:
        if "oov" in piece:
            return int(self.hf.get_vocab_size()) + 7
        named = EOS if "eos" in piece else piece.get("special") or piece.get("added")
        token = named or _spelling(self.kind, piece)
        token_id = self.hf.token_to_id(token)
        assert token_id is not None, piece
        return int(token_id)

    def ids_of(self, pieces: Sequence[Piece]) -> list[int]:
        return [self.id_of(piece) for piece in pieces]


def _byte_letters() -> dict[int, str]:
    """Ask the library for the letters that byte-level BPE writes bytes as."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {}
    for char in map(chr, range(0x800)):
        letters.update(zip(char.encode(), encoder.pre_tokenize_str(char)[0][0], strict=True))
    # Those that are in no such character, 0xC0 and above, stand for themselves.
    return {byte: letters.get(byte, chr(byte)) for byte in range(256)}


BYTE_LETTERS = _byte_letters()


def _spelling(kind: str, piece: Piece) -> str:
    if kind == "sp_byte_fallback":
        return str(piece["sp"])
    return "".join(BYTE_LETTERS[byte] for byte in _piece_bytes(piece))


def _piece_bytes(piece: Piece) -> bytes:
    return bytes.fromhex(piece["hex"]) if "hex" in piece else piece["text"].encode()


def _decoder(kind: str) -> Any:
    if kind == "byte_level":
        return decoders.ByteLevel()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def expanded(pieces: Sequence[Piece]) -> list[Piece]:
    """Unroll "repeat"."""
    return [one for piece in pieces for one in [piece.get("piece", piece)] * piece.get("repeat", 1)]


class Bench:
    """A real output processor, fed with records as an engine would."""

    def __init__(self, tokenizer: TinyTokenizer) -> None:
        self.tokenizer = tokenizer
        self.aborts: list[int] = []
        self.processor = OutputProcessor(tokenizer.server, self.aborts.extend)

    def add(
        self, prompt: Sequence[int], params: SamplingParams, kind: OutputKind, request_id: str = "r"
    ) -> tuple[list[int], RequestOutputCollector]:
        """Register a request; return its handles and its collector."""
        request = ProcessedRequest(
            request_id=request_id, prompt_token_ids=list(prompt), params=params, kind=kind, max_tokens=10**6,
            eos_token_id=self.tokenizer.eos_id, stop_token_ids=params.stop_token_ids, first_index=0,
        )  # fmt: skip
        collector = RequestOutputCollector(request_id, list(prompt), params.n, kind)
        return [self.processor.add(request, n, collector).handle for n in range(params.n)], collector

    def step(self, *rows: tuple[int, list[int], int, int], is_behind: bool = False, num_logprobs: int = -1) -> None:
        """Process one record. A row is handle, token ids, finish reason and stop token id."""
        handles, token_ids, finish, stop_ids = (list(column) for column in zip(*rows, strict=True))
        is_plain = all(len(ids) == 1 for ids in token_ids)
        offsets = [sum(map(len, token_ids[:n])) for n in range(len(rows))]
        has_finish = any(finish)
        record = StepRecord(
            RecordHeader(*[0] * 18), handles, [one for ids in token_ids for one in ids],
            token_offsets=None if is_plain else offsets, num_tokens=None if is_plain else list(map(len, token_ids)),
            finish_reasons=finish if has_finish else None, stop_token_ids=stop_ids if has_finish else None,
            logprobs=logprobs_of(token_ids, num_logprobs + 1),
        )  # fmt: skip
        drive(self.processor.process(record, is_behind))


def logprobs_of(rows: list[list[int]], width: int) -> Logprobs | None:
    """Return logprobs from which each token's place in its record can be read; the same width for all rows."""
    if not width:
        return None
    token_ids = [token_id for row in rows for token_id in row]
    sizes = [len(row) * width for row in rows]
    return Logprobs(
        num_entries=[width] * len(rows), starts=[sum(sizes[:n]) for n in range(len(rows))],
        token_ids=[token_id + k for token_id in token_ids for k in range(width)],
        logprobs=[-n - k / 8 for n in range(len(token_ids)) for k in range(width)],
        sampled_ranks=[n + 1 for n in range(len(token_ids))],
    )  # fmt: skip


def drive(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing but its turn."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration:
            return


def take(collector: RequestOutputCollector, into: Seen) -> None:
    try:
        output = collector.get_nowait()
    except EngineGenerateError as exc:
        into.error = exc
        return
    if output is not None:
        into.outputs += output.outputs


def engine_tokens(
    tokenizer: TinyTokenizer, pieces: Sequence[Piece], params: SamplingParams
) -> tuple[list[int], int, int]:
    """Return what an engine would send: ids up to its end, its finish reason, and its stop token id."""
    ids = tokenizer.ids_of(pieces)
    limit = len(ids) if params.max_tokens is None else min(params.max_tokens, len(ids))
    for n, token_id in enumerate(ids[:limit], 1):
        if token_id in params.stop_token_ids:
            return ids[:n], FinishReason.STOP, token_id
        if token_id == tokenizer.eos_id and not params.ignore_eos:
            return ids[:n], FinishReason.STOP, -1
    return ids[:limit], FinishReason.LENGTH, -1


def grouped(ids: list[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    for size in cycle(sizes):
        if not ids:
            return
        yield ids[:size]
        ids = ids[size:]


def generate(
    tokenizer: TinyTokenizer, prompt: Sequence[Piece], pieces: Sequence[Piece], params: SamplingParams,
    sizes: Sequence[int], kind: OutputKind,
) -> Seen:  # fmt: skip
    """Run one request to its end. Rows that come after a stop string ended it go on arriving, as from a real engine."""
    bench, seen = Bench(tokenizer), Seen()
    (handle,), collector = bench.add(tokenizer.ids_of(prompt), params, kind)
    ids, finish, stop_id = engine_tokens(tokenizer, pieces, params)
    num_left, is_ended_here = len(ids), False
    for group in grouped(ids, sizes):
        num_left -= len(group)
        num_late = bench.processor.num_late_rows
        row = (handle, group, *((int(finish), stop_id) if num_left == 0 else (0, -1)))
        bench.step(row, num_logprobs=-1 if params.logprobs is None else params.logprobs)
        take(collector, seen)
        assert bench.processor.num_late_rows - num_late == is_ended_here
        is_ended_here = is_ended_here or (collector.is_finished and num_left > 0)
    assert collector.is_finished
    assert seen.error is None
    assert bench.processor.num_live == 0
    assert bench.aborts == ([handle] if is_ended_here else [])
    assert [output.finish_reason is None for output in seen.outputs] == [True] * (len(seen.outputs) - 1) + [False]
    return seen


def check_all_agree(
    tokenizer: TinyTokenizer, prompt: Sequence[Piece], pieces: Sequence[Piece], params: SamplingParams
) -> tuple[CompletionOutput, list[str]]:
    """Run every grouping and kind; return the final output that all agree on, and the deltas of one token a step."""
    finals, one_a_step = [], []
    for sizes in GROUPINGS:
        streamed = generate(tokenizer, prompt, pieces, params, sizes, OutputKind.DELTA)
        whole = generate(tokenizer, prompt, pieces, params, sizes, OutputKind.FINAL_ONLY)
        so_far = generate(tokenizer, prompt, pieces, params, sizes, OutputKind.CUMULATIVE)
        assert len(whole.outputs) == 1
        text, token_ids = "", []
        for delta, total in zip(streamed.outputs, so_far.outputs, strict=True):
            text += delta.text
            token_ids += delta.token_ids
            assert (text, token_ids) == (total.text, total.token_ids)
            assert (delta.finish_reason, delta.stop_reason) == (total.finish_reason, total.stop_reason)
            assert whole.last.text.startswith(text)
        assert so_far.last == whole.last
        finals.append(whole.last)
        one_a_step = one_a_step or streamed.deltas
    assert all(final == finals[0] for final in finals)
    return finals[0], one_a_step


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_gives_its_text_under_every_grouping_and_kind(case: dict[str, Any]) -> None:
    prompt, pieces, expect = case["prompt_pieces"], expanded(case["pieces"]), case["expect"]
    options = {"max_tokens": None} | case["params"]
    params = SamplingParams(**options | {"stop": tuple(options.get("stop", ()))})
    assert case["when_pieces_run_out"] == "length"
    tokenizer = TinyTokenizer(case["tokenizer"], [*prompt, *pieces])
    final, deltas = check_all_agree(tokenizer, prompt, pieces, params)

    repeated = expect.get("text_repeated")
    assert final.text == (repeated[0] * repeated[1] if repeated else expect["text"])
    assert not [part for part in expect.get("forbidden_substrings", ()) if any(part in delta for delta in deltas)]
    for name in ("finish_reason", "stop_reason"):
        if name in expect:
            assert getattr(final, name) == expect[name]
    if "completion_tokens" in expect:
        assert len(final.token_ids) == expect["completion_tokens"]
    if "deltas" in expect:
        assert [delta for delta in deltas if delta] == expect["deltas"]
    if "minimal_hold_deltas" in expect:
        assert deltas == expect["minimal_hold_deltas"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_each_token_of_a_case_keeps_its_logprobs_under_every_grouping_and_kind(case: dict[str, Any]) -> None:
    prompt, pieces = case["prompt_pieces"], expanded(case["pieces"])[:200]
    options = {"max_tokens": None} | case["params"]
    params = SamplingParams(**options | {"stop": tuple(options.get("stop", ())), "logprobs": 1})
    tokenizer = TinyTokenizer(case["tokenizer"], [*prompt, *pieces])
    for sizes in GROUPINGS:
        for kind in OutputKind:
            seen = generate(tokenizer, prompt, pieces, params, sizes, kind)
            for output in seen.outputs:
                assert output.logprobs is not None
                assert output.logprobs.token_ids[::2] == output.token_ids
                assert [k - 1 for k in output.logprobs.token_ids[1::2]] == output.token_ids
                assert len(output.logprobs.ranks) == len(output.token_ids)
                assert [-value for value in output.logprobs.logprobs[::2]] == [n - 1 for n in output.logprobs.ranks]
    assert all(
        output.logprobs is None
        for output in generate(tokenizer, prompt, pieces, replace(params, logprobs=None), [2], OutputKind.DELTA).outputs
    )


def test_bytes_that_never_become_a_character_cost_linear_time() -> None:
    (case,) = [case for case in CASES if case["id"] == "A06c"]
    pieces = expanded(case["pieces"])
    tokenizer = TinyTokenizer(case["tokenizer"], pieces)
    began = time.perf_counter()
    seen = generate(tokenizer, [], pieces, SamplingParams(max_tokens=None), [1], OutputKind.DELTA)
    took_s, limit_s = time.perf_counter() - began, case["expect"]["max_total_seconds"]
    print(f"A06c: {took_s:.3f} s, the case's limit is {limit_s} s")
    assert took_s < 5 * limit_s
    assert seen.deltas == ["\ufffd"] * len(pieces)


# An independent statement of what a sequence's text is, to compare random cases with.


def certain_text(data: bytes) -> str:
    """Decode, without an incomplete character at the end: a tail that some bytes after it make whole."""
    for length in (3, 2, 1):
        tail = data[-length:]
        if len(tail) == length and any(_is_one_char(tail + more) for more in _CONTINUATIONS):
            return data[:-length].decode(errors="replace")
    return data.decode(errors="replace")


# The second byte of E0, ED, F0 and F4 has a range of its own: one of these is in each.
_CONTINUATIONS = [bytes((a, *rest)) for a in (0x80, 0x90, 0xA0) for rest in ((), (0x80,), (0x80, 0x80))]


def _is_one_char(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def raw_bytes(tokenizer: TinyTokenizer, piece: Piece, params: SamplingParams) -> bytes:
    if "oov" in piece or (piece.keys() & {"special", "eos"} and params.skip_special_tokens):
        return b""
    if "eos" in piece:
        return EOS.encode()
    if "special" in piece or "added" in piece:
        return str(piece.get("special") or piece.get("added")).encode()
    if tokenizer.kind == "byte_level":
        return _piece_bytes(piece)
    if piece["sp"].startswith("<0x"):
        return bytes.fromhex(piece["sp"][3:5])
    return str(piece["sp"]).replace("▁", " ").encode()


def expected_output(
    tokenizer: TinyTokenizer, prompt: Sequence[Piece], pieces: Sequence[Piece], params: SamplingParams
) -> tuple[str, str, str | int | None, int]:
    """Return text, finish reason, stop reason and number of tokens, by whole decodes and one character at a time."""
    strips = tokenizer.kind == "sp_byte_fallback"

    def text_of(data: bytes) -> str:
        text = certain_text(data)
        return text[1:] if strips and text[:1] == " " else text

    data = b"".join(raw_bytes(tokenizer, piece, params) for piece in prompt)
    num_prompt, text = len(text_of(data)), ""
    ids, finish, stop_id = engine_tokens(tokenizer, pieces, params)
    for n, piece in enumerate(pieces[: len(ids)], 1):
        is_silent = finish == FinishReason.STOP and n == len(ids) and not params.include_stop_str_in_output
        data += b"" if is_silent else raw_bytes(tokenizer, piece, params)
        for char in text_of(data)[num_prompt + len(text) :]:
            text += char
            for stop in params.stop if n > params.min_tokens else ():
                if text.endswith(stop):
                    cut = text if params.include_stop_str_in_output else text[: -len(stop)]
                    return cut, "stop", stop, n
    if finish == FinishReason.LENGTH:
        return text, "length", None, len(ids)
    return text, "stop", None if stop_id < 0 else stop_id, len(ids)


_EMOJI = "👩‍👧é€🙂\ufffd"
_BYTES = st.sampled_from([bytes([b]) for b in _EMOJI.encode()] + [b"\xff", b"\xe0", b"\xed\xa0", b"\xf4\x90", b"\x80"])
_TEXT = st.text("ab \n🙂é", min_size=1, max_size=4).map(str.encode)
_PLAIN = st.one_of(_BYTES, _TEXT, st.tuples(_TEXT, _BYTES).map(b"".join)).map(lambda data: {"hex": data.hex()})
_SP = st.one_of(st.text("ab▁é\n", min_size=1, max_size=3), _BYTES.map(lambda data: f"<0x{data[0]:02X}>"))
_OTHER = st.sampled_from([{"oov": True}, {"special": "<|x|>"}, {"added": "<tool ab>"}])
_STOPS = st.lists(st.text("ab \n🙂é€\ufffd<", min_size=1, max_size=4), max_size=3, unique=True)


@st.composite
def requests(draw: st.DrawFn) -> tuple[TinyTokenizer, list[Piece], list[Piece], SamplingParams]:
    kind = draw(st.sampled_from(["byte_level", "sp_byte_fallback"]))
    one = st.one_of(_PLAIN if kind == "byte_level" else _SP.map(lambda piece: {"sp": piece}), _OTHER)
    prompt = draw(st.lists(one, max_size=3))
    pieces = draw(st.lists(st.one_of(one, one, one, one, one, st.just({"eos": True})), min_size=1, max_size=12))
    tokenizer = TinyTokenizer(kind, [*prompt, *pieces])
    stop_token_ids = draw(st.sampled_from([(), (), (tokenizer.id_of(pieces[-1]),)]))
    params = SamplingParams(
        max_tokens=draw(st.sampled_from([None, 3, 9])), min_tokens=draw(st.sampled_from([0, 0, 1, 2, 5])),
        stop=tuple(draw(_STOPS)), stop_token_ids=stop_token_ids, include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()), skip_special_tokens=draw(st.booleans()),
    )  # fmt: skip
    return tokenizer, prompt, pieces, params


@settings(deadline=None, derandomize=True, max_examples=120)
@given(requests())
def test_random_pieces_give_the_oracles_text(
    request_: tuple[TinyTokenizer, list[Piece], list[Piece], SamplingParams],
) -> None:
    tokenizer, prompt, pieces, params = request_
    final, _ = check_all_agree(tokenizer, prompt, pieces, params)
    seen = (final.text, final.finish_reason, final.stop_reason, len(final.token_ids))
    assert seen == expected_output(tokenizer, prompt, pieces, params)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.text(min_size=1, max_size=5), st.data())
@example("👩‍👩‍👧", None)
def test_text_cut_into_tokens_anywhere_comes_out_whole(text: str, data: st.DataObject | None) -> None:
    raw = text.encode()
    cuts = range(len(raw)) if data is None else sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)))
    borders = [0, *cuts, len(raw)]
    pieces = [{"hex": raw[a:b].hex()} for a, b in pairwise(borders) if a < b]
    final, deltas = check_all_agree(TinyTokenizer("byte_level", pieces), [], pieces, SamplingParams(max_tokens=None))
    assert final.text == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


def test_deltas_merged_while_the_reader_is_behind_join_to_the_same_text() -> None:
    pieces = [{"text": "red"}, {"hex": "f09f"}, {"hex": "9982"}, {"text": " blue"}]
    tokenizer = TinyTokenizer("byte_level", pieces)
    bench, seen = Bench(tokenizer), Seen()
    (handle,), collector = bench.add([], SamplingParams(stop=("blues",)), OutputKind.DELTA)
    for token_id in tokenizer.ids_of(pieces):
        bench.step((handle, [token_id], 0, -1), is_behind=True)
    bench.processor.flush()
    take(collector, seen)
    assert seen.deltas == ["red🙂 "]
    bench.step((handle, [], int(FinishReason.LENGTH), -1))
    take(collector, seen)
    assert seen.deltas == ["red🙂 ", "blue"]
    assert seen.last.finish_reason == "length"


# Stop token ids.


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_a_stop_token_id_is_the_stop_reason_and_text_only_if_included(include: bool, skip_special_tokens: bool) -> None:
    for stop_piece, shown in (({"text": "END"}, "END"), ({"special": "<|x|>"}, "" if skip_special_tokens else "<|x|>")):
        pieces = [{"text": "a"}, stop_piece, {"text": "b"}]
        tokenizer = TinyTokenizer("byte_level", pieces)
        params = SamplingParams(
            max_tokens=None, stop_token_ids=(tokenizer.id_of(stop_piece),), include_stop_str_in_output=include,
            skip_special_tokens=skip_special_tokens,
        )  # fmt: skip
        final, _ = check_all_agree(tokenizer, [], pieces, params)
        assert final.text == ("a" + shown if include else "a")
        assert (final.finish_reason, final.stop_reason) == ("stop", tokenizer.id_of(stop_piece))
        assert len(final.token_ids) == 2


def test_a_stop_string_completed_by_the_text_of_an_included_stop_token_wins() -> None:
    pieces = [{"text": "xEN"}, {"text": "D!"}]
    tokenizer = TinyTokenizer("byte_level", pieces)
    params = SamplingParams(
        max_tokens=None, stop=("END",), stop_token_ids=(tokenizer.id_of(pieces[1]),), include_stop_str_in_output=True
    )
    final, _ = check_all_agree(tokenizer, [], pieces, params)
    assert (final.text, final.finish_reason, final.stop_reason) == ("xEND", "stop", "END")


def test_a_hidden_stop_token_completes_no_stop_string() -> None:
    pieces = [{"text": "xEN"}, {"text": "D!"}]
    tokenizer = TinyTokenizer("byte_level", pieces)
    params = SamplingParams(max_tokens=None, stop=("END",), stop_token_ids=(tokenizer.id_of(pieces[1]),))
    final, deltas = check_all_agree(tokenizer, [], pieces, params)
    assert (final.text, final.finish_reason, final.stop_reason) == ("xEN", "stop", tokenizer.id_of(pieces[1]))
    assert deltas == ["x", "EN"]


# Ids that are none, and several sequences.


@pytest.mark.parametrize("bad_id", [-1, -(2**63), 2**31, 2**32, 2**63, 2**64])
@pytest.mark.parametrize("kind", ["byte_level", "sp_byte_fallback"])
@pytest.mark.parametrize("with_stop", [False, True])
def test_an_impossible_id_ends_its_request_with_an_error_and_no_other(bad_id: int, kind: str, with_stop: bool) -> None:
    pieces = [{"text": "a", "sp": "a"}, {"text": "b", "sp": "b"}]
    tokenizer = TinyTokenizer(kind, pieces)
    a, b = tokenizer.ids_of(pieces)
    bench = Bench(tokenizer)
    params = SamplingParams(max_tokens=None, stop=("zzz",) if with_stop else ())
    bad, good = Seen(), Seen()
    (bad_handle,), bad_collector = bench.add([a], params, OutputKind.DELTA, "bad")
    (good_handle,), good_collector = bench.add([a], params, OutputKind.DELTA, "good")
    bench.step((bad_handle, [a], 0, -1), (good_handle, [a], 0, -1))
    bench.step((bad_handle, [bad_id], 0, -1), (good_handle, [b], 0, -1))
    bench.step((bad_handle, [b], 0, -1), (good_handle, [b, a], int(FinishReason.LENGTH), -1))
    while bad.error is None:
        take(bad_collector, bad)
    take(good_collector, good)
    assert bad.deltas == ["a"]
    assert str(bad_id) in str(bad.error)
    assert bench.aborts == [bad_handle]
    assert (good.error, good.deltas, good.last.finish_reason) == (None, ["abba"], "length")
    assert bench.processor.num_late_rows == 1
    assert bench.processor.num_live == 0


@pytest.mark.parametrize("kind", list(OutputKind))
def test_a_stop_string_ends_one_of_two_children_and_not_the_other(kind: OutputKind) -> None:
    pieces = [{"text": "aEN"}, {"text": "D"}, {"text": "c"}]
    tokenizer = TinyTokenizer("byte_level", pieces)
    ids = tokenizer.ids_of(pieces)
    bench, seen = Bench(tokenizer), Seen()
    (first, second), collector = bench.add(ids, SamplingParams(n=2, stop=("END",)), kind)
    bench.step((first, [ids[0]], 0, -1), (second, [ids[0]], 0, -1))
    bench.step((first, [ids[1]], 0, -1), (second, [ids[2]], 0, -1))
    assert bench.aborts == [first]
    assert not collector.is_finished
    bench.step((first, [ids[2]], 0, -1), (second, [ids[2]], int(FinishReason.LENGTH), -1))
    take(collector, seen)
    assert [(o.index, o.text, o.finish_reason, o.stop_reason) for o in seen.outputs] == [
        (0, "a", "stop", "END"),
        (1, "aENcc", "length", None),
    ]
    assert [len(output.token_ids) for output in seen.outputs] == [2, 3]
    assert bench.aborts == [first]


@pytest.mark.parametrize("kind", list(OutputKind))
def test_an_abort_from_outside_releases_held_back_text(kind: OutputKind) -> None:
    pieces = [{"text": "red"}, {"text": " blue"}, {"hex": "f09f"}]
    tokenizer = TinyTokenizer("byte_level", pieces)
    bench, seen = Bench(tokenizer), Seen()
    (handle,), collector = bench.add([], SamplingParams(stop=(" blues",)), kind)
    for token_id in tokenizer.ids_of(pieces):
        bench.step((handle, [token_id], 0, -1))
    assert bench.processor.abort("r") == [handle]
    assert bench.processor.abort("r") == []
    take(collector, seen)
    assert [(o.text, o.finish_reason, o.stop_reason) for o in seen.outputs] == [("red blue", "abort", None)]
    assert len(seen.last.token_ids) == 3
    bench.step((handle, [0], 0, -1))
    assert bench.processor.num_late_rows == 1


def test_an_engine_error_ends_the_request_after_the_text_before_it() -> None:
    pieces = [{"text": "a"}]
    tokenizer = TinyTokenizer("byte_level", pieces)
    bench, seen = Bench(tokenizer), Seen()
    (handle,), collector = bench.add([], SamplingParams(), OutputKind.DELTA)
    bench.step((handle, tokenizer.ids_of(pieces), 0, -1))
    bench.step((handle, [], int(FinishReason.ERROR), -1))
    take(collector, seen)
    take(collector, seen)
    assert seen.deltas == ["a"]
    assert isinstance(seen.error, EngineGenerateError)


def test_a_duplicate_stop_string_changes_nothing() -> None:
    pieces = [{"text": "xEN"}, {"text": "D"}]
    tokenizer = TinyTokenizer("byte_level", pieces)
    params = SamplingParams(max_tokens=None, stop=("END", "END"))
    final, _ = check_all_agree(tokenizer, [], pieces, params)
    assert final == check_all_agree(tokenizer, [], pieces, replace(params, stop=("END",)))[0]


# A consumer that does not keep up.


class StalledWriter:
    """Takes nothing until it is told to; keeps what it is given."""

    def __init__(self) -> None:
        self.is_writable = False
        self.outputs: list[CompletionOutput] = []
        self.errors: list[Exception] = []

    def write(self, output: CompletionOutput) -> None:
        self.outputs.append(output)

    def delta_writer(self, index: int) -> Callable[[bytes], bool]:  # noqa: ARG002  # the protocol's
        return lambda _: False

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("ending", ["finish", "error", "none"])
def test_a_stalled_client_misses_nothing_and_costs_no_text(interval: int, ending: str) -> None:
    pieces = [{"text": "red"}, {"hex": "f09f"}, {"hex": "9982"}, {"text": " blue"}]
    tokenizer = TinyTokenizer("byte_level", pieces)
    ids = tokenizer.ids_of(pieces) * 3000
    bench, writer = Bench(tokenizer), StalledWriter()
    params = SamplingParams(max_tokens=None, stream_interval=interval)
    (handle,), collector = bench.add([], params, OutputKind.DELTA)
    collector.attach(writer)
    for token_id in ids:
        bench.step((handle, [token_id], 0, -1))
    assert writer.outputs == []
    if ending == "finish":
        bench.step((handle, [], int(FinishReason.LENGTH), -1))
    elif ending == "error":
        bench.processor.fail(handle, EngineGenerateError("gone"))
    writer.is_writable = True
    collector.flush()
    assert "".join(output.text for output in writer.outputs) == "red🙂 blue" * 3000
    assert [token_id for output in writer.outputs for token_id in output.token_ids] == ids
    assert writer.outputs[-1].num_tokens == len(ids)
    assert [output.finish_reason for output in writer.outputs][-1] == ("length" if ending == "finish" else None)
    assert [str(error) for error in writer.errors] == (["gone"] if ending == "error" else [])
    if ending == "none":
        assert max(len(output.token_ids) for output in writer.outputs) <= 4096
        bench.step((handle, [ids[0]], 0, -1), (handle, [ids[0]], 0, -1), (handle, [ids[0]], 0, -1))
        assert writer.outputs[-1].text.startswith("red")


def test_tokens_of_a_stalled_client_are_held_as_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TinyTokenizer("byte_level", [{"text": "a"}])
    bench, writer = Bench(tokenizer), StalledWriter()
    (handle,), collector = bench.add([], SamplingParams(max_tokens=None), OutputKind.DELTA)
    collector.attach(writer)
    bench.step((handle, [tokenizer.ids_of([{"text": "a"}])[0]], 0, -1))
    monkeypatch.setattr(
        "ringserve.server.generation.output_processor.RequestState.advance", lambda *_: pytest.fail("it became text")
    )
    for is_behind in (False, True) * 50:
        bench.step((handle, [tokenizer.ids_of([{"text": "a"}])[0]], 0, -1), is_behind=is_behind)
    writer.is_writable = True
    collector.flush()
    assert "".join(output.text for output in writer.outputs) == "a" * 101
