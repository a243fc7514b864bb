import json
import random
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ringserve.engine.config import EngineConfig
from ringserve.engine.core.overlap import OverlappingCore
from ringserve.engine.sampling.grammar import CompiledGrammar, GrammarCompiler, GrammarError, load_tokenizer
from ringserve.engine.sampling.grammar_mask import _unpack, apply_grammars_
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.grammar_limits import GRAMMAR_LIMITS
from ringserve.shm_transport.messages import AddRequest, Fork
from ringserve.shm_transport.records import GRAMMAR_END, FinishReason

END, OTHER_END = 0, 1
ALPHABET = "abcdefghijklmnopqrst0123456789"  # tokens 2 to 31
MakeDriver = Callable[..., Any]


def text_of(token_ids: list[int]) -> str:
    return "".join("" if token_id < 2 else ALPHABET[token_id - 2] for token_id in token_ids)


def ids_of(text: str) -> list[int]:
    return [2 + ALPHABET.index(character) for character in text]


def regex(pattern: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of 32 tokens, two of them special."""
    vocab = {"<end>": END, "<other>": OTHER_END} | {character: 2 + n for n, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<other>", special=True)])
    path: Path = tmp_path_factory.mktemp("characters")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def driver(model_directory: Path, make_driver: MakeDriver, make_hashing_runner: Any) -> Any:
    """Four seats over a runner whose tokens depend on the whole context."""
    return make_driver(EngineConfig(model=str(model_directory), max_num_seqs=4), make_hashing_runner())


def test_an_output_follows_its_grammar_and_ends_with_its_last_token(driver: Any) -> None:
    for handle, pattern in enumerate(("[a-d]{3}[0-9]{2}", "(abc|bcd)+[0-9]", "qrst")):
        driver.add(handle, [3, handle], grammar=regex(pattern), max_tokens=40)
    driver.run()
    assert driver.failures == {}
    for handle, pattern in enumerate(("[a-d]{3}[0-9]{2}", "(abc|bcd)+[0-9]", "qrst")):
        assert re.fullmatch(pattern, text_of(driver.tokens[handle]))
        assert driver.finishes[handle] == (FinishReason.STOP, GRAMMAR_END)
    assert driver.is_idle_and_empty()


def test_eos_comes_only_where_the_grammar_may_end(driver: Any) -> None:
    driver.add(1, [3], grammar=regex("a{3,}"), eos_token_id=END, logit_bias=((END, 100.0),))
    driver.run()
    assert driver.tokens[1] == [*ids_of("aaa"), END]
    assert driver.finishes[1] == (FinishReason.STOP, -1)


def test_special_stop_tokens_come_where_the_grammar_may_end(driver: Any) -> None:
    params = {"logit_bias": ((OTHER_END, 100.0),), "eos_token_id": END}
    driver.add(1, [3], grammar=regex("a{3,}"), stop_token_ids=(OTHER_END,), **params)
    driver.run()
    assert driver.tokens[1] == [*ids_of("aaa"), OTHER_END]
    assert driver.finishes[1] == (FinishReason.STOP, OTHER_END)


def test_stop_tokens_that_are_text_end_an_output_only_where_it_is_whole_with_them_and_without(driver: Any) -> None:
    (letter,) = ids_of("b")
    params = {"stop_token_ids": (letter,), "eos_token_id": END}
    expected = {"ab+": "abb", "(ab|ba)*": "", "b{2,4}": "bbb", "ab(cb)+": ""}
    for handle, pattern in enumerate(expected):
        driver.add(handle, [3, handle], grammar=regex(pattern), logit_bias=((letter, 100.0), (END, -100.0)), **params)
    driver.run()
    for handle, text in enumerate(expected.values()):
        tokens, finish = driver.tokens[handle], driver.finishes[handle]
        if text:
            assert (text_of(tokens), finish) == (text, (FinishReason.STOP, letter))
        else:
            assert finish == (FinishReason.LENGTH, -1)
            assert len(tokens) == 16


def test_min_tokens_withholds_no_text_that_a_grammar_needs_early(driver: Any) -> None:
    (letter,) = ids_of("b")
    params = {"stop_token_ids": (letter,), "eos_token_id": END, "min_tokens": 4, "logit_bias": ((letter, 100.0),)}
    driver.add(1, [3], grammar=regex("bab+"), **params)
    driver.run()
    assert text_of(driver.tokens[1]) == "babbb"
    assert driver.finishes[1] == (FinishReason.STOP, letter)


def test_eos_is_no_text_for_a_request_that_ignores_it(driver: Any) -> None:
    driver.add(1, [3], grammar=regex("a{3,8}"), logit_bias=((END, 100.0),))
    driver.run()
    assert driver.tokens[1] == ids_of("a" * 8)
    assert driver.finishes[1] == (FinishReason.STOP, GRAMMAR_END)


def test_min_tokens_withholds_eos_but_not_the_grammars_own_end(driver: Any) -> None:
    params = {"eos_token_id": END, "logit_bias": ((END, 100.0),), "min_tokens": 6}
    driver.add(1, [3], grammar=regex("a{3,}"), **params)
    driver.add(2, [3], grammar=regex("abc"), **params)
    driver.run()
    assert driver.tokens[1] == [*ids_of("aaaaaa"), END]
    assert driver.tokens[2] == ids_of("abc")


@pytest.mark.parametrize(
    "text", ["<|im_end|>x", "a<|im_end|>x", "<|im_start|>x", '{"k": "<|endoftext|>"}', "a<|im_end|>"]
)
def test_text_spelled_like_a_special_token_is_written_in_ordinary_ones(text: str) -> None:
    from ringserve.server.settings.model_path import resolve

    tokenizer = load_tokenizer(resolve(None) / "tokenizer.json", 49152)
    library = LLMatcher(tokenizer, f"start: {json.dumps(text)}", log_level=0)
    matcher = CompiledGrammar(library, tokenizer).matcher(
        AddRequest(handle=1, prompt_token_ids=np.ones(1, np.int32), max_tokens=99, eos_token_id=2)
    )
    mask, written = np.zeros(matcher.num_mask_bytes, np.uint8), list[int]()
    while not matcher.is_complete:
        matcher.fill(mask)
        written.append(int(np.unpackbits(mask, bitorder="little").nonzero()[0][-1]))
        matcher.consume(written[-1])
    assert not any(map(tokenizer.is_special_token, written))
    assert tokenizer.decode_str(written) == text


def test_the_length_may_come_first(driver: Any) -> None:
    driver.add(1, [3], grammar=regex("a{9}"), max_tokens=4)
    driver.add(2, [3], grammar=regex("a{4}"), max_tokens=4)
    driver.run()
    assert driver.tokens == {1: ids_of("aaaa"), 2: ids_of("aaaa")}
    assert driver.finishes == {1: (FinishReason.LENGTH, -1), 2: (FinishReason.STOP, GRAMMAR_END)}


def test_each_fork_follows_the_grammar_by_itself(driver: Any) -> None:
    forks = (Fork(11, 11), Fork(12, 12), Fork(13, 13))
    driver.add(10, [3], grammar=regex("[a-j]{4}[0-9]"), temperature=2.0, seed=10, forks=forks)
    driver.run()
    texts = [text_of(driver.tokens[handle]) for handle in (10, 11, 12, 13)]
    assert all(re.fullmatch("[a-j]{4}[0-9]", text) for text in texts)
    assert len(set(texts)) == 4


def test_a_seed_gives_the_same_tokens_beside_others(driver: Any) -> None:
    params = {"grammar": regex("[a-t]+[0-9]"), "temperature": 1.5, "seed": 5, "max_tokens": 20}
    driver.add(1, [3], **params)
    driver.run()
    driver.add(2, [3], **params)
    driver.add(3, [3], **params | {"seed": 6})
    driver.add(4, [3])
    driver.run()
    assert driver.tokens[1] == driver.tokens[2] != driver.tokens[3]


def test_preemption_loses_nothing_of_a_grammar(
    model_directory: Path, make_driver: MakeDriver, make_hashing_runner: Any
) -> None:
    config = EngineConfig(model=str(model_directory), max_num_seqs=4)
    outputs = []
    for num_blocks in (257, 12):
        driver = make_driver(config, make_hashing_runner(num_blocks=num_blocks))
        for handle in range(4):
            params = {"grammar": regex("([a-j][0-9]){14}"), "max_tokens": 40, "temperature": 1.0, "seed": handle}
            driver.add(handle, [4, 5, handle], **params)
        driver.run()
        assert driver.is_idle_and_empty()
        outputs.append((driver.tokens, driver.core.idle_step().num_preemptions))
    (plain, none), (preempted, some) = outputs
    assert none == 0
    assert some > 0
    assert plain == preempted
    assert all(re.fullmatch("([a-j][0-9]){14}", text_of(tokens)) for tokens in plain.values())


def test_rows_without_a_grammar_get_what_they_get_alone(driver: Any, hashed_tokens: Any) -> None:
    driver.add(1, [3, 4], max_tokens=12)
    driver.add(2, [3, 4], grammar=regex("[0-9]{12}"))
    driver.add(3, [9], max_tokens=12)
    driver.run()
    assert driver.tokens[1] == hashed_tokens([3, 4], 12)
    assert driver.tokens[3] == hashed_tokens([9], 12)
    assert re.fullmatch("[0-9]{12}", text_of(driver.tokens[2]))


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /(/",
        "nonsense",
        "{}",
        'start: "a" other',
        '{"grammars": [{"json_schema": 3}]}',
    ],
)
def test_a_grammar_that_does_not_compile_ends_its_request_alone(grammar: str, driver: Any) -> None:
    driver.add(1, [3], max_tokens=9)
    driver.add(2, [3], grammar=grammar, forks=(Fork(3, 3),))
    driver.run()
    assert sorted(driver.failures) == [2, 3]
    assert all("does not compile" in why for why in driver.failures.values())
    assert driver.refused == {2, 3}
    assert len(driver.tokens[1]) == 9
    assert driver.is_idle_and_empty()


def test_a_model_without_a_tokenizer_follows_no_grammar(
    tmp_path: Path, make_driver: MakeDriver, make_hashing_runner: Any
) -> None:
    driver = make_driver(EngineConfig(model=str(tmp_path)), make_hashing_runner())
    driver.add(1, [3], grammar=regex("a"))
    driver.add(2, [3], max_tokens=2)
    driver.run()
    assert "tokenizer.json" in driver.failures[1]
    assert driver.refused == set()
    assert len(driver.tokens[2]) == 2


@pytest.mark.parametrize(
    ("params", "num_tokens", "named"),
    [
        ({"allowed_token_ids": tuple(ids_of("abc"))}, 0, "allowed_token_ids"),
        ({"allowed_token_ids": tuple(ids_of("0123456789"))}, 2, "allowed_token_ids"),
        ({"bad_token_ids": tuple(ids_of("abc"))}, 2, "bad_words"),
        (
            {"allowed_token_ids": tuple(ids_of("0a")), "bad_token_ids": tuple(ids_of("abc"))},
            2,
            "allowed_token_ids and bad_words",
        ),
    ],
)
def test_rules_that_leave_no_token_of_a_grammar_are_refused_by_name_and_alone(
    params: dict[str, Any], num_tokens: int, named: str, driver: Any
) -> None:
    driver.add(1, [3], grammar=regex("[0-9]{2}[abc]"), **params)
    driver.add(2, [3], max_tokens=5)
    driver.run()
    assert driver.refused == {1}
    assert f"the first {num_tokens}: of those that the grammar has there, {named} let none come" in driver.failures[1]
    assert len(driver.tokens.get(1, [])) == num_tokens
    assert len(driver.tokens[2]) == 5


def test_a_grammar_that_becomes_too_complex_is_refused_when_it_does(
    model_directory: Path, make_driver: MakeDriver, make_hashing_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRAMMAR_LIMITS, "max_lexer_states", 200)
    driver = make_driver(EngineConfig(model=str(model_directory), max_num_seqs=4), make_hashing_runner())
    params = {"allowed_token_ids": tuple(ids_of("ab")), "temperature": 2.0, "max_tokens": 500, "seed": 1}
    driver.add(1, [3], grammar=regex("(.*a.{9}b)+"), **params)
    driver.add(2, [3], max_tokens=40)
    driver.run()
    assert driver.refused == {1}
    assert "too complex" in driver.failures[1]
    assert "simplify it" in driver.failures[1]
    assert set(text_of(driver.tokens[1])) == {"a", "b"}
    assert len(driver.tokens[2]) == 40


def test_rules_and_grammar_hold_together(driver: Any) -> None:
    allowed, bad = tuple(ids_of("ab01")), tuple(ids_of("a"))
    driver.add(1, [3], grammar=regex("[a-z]{3}[0-9]{3}"), allowed_token_ids=allowed, bad_token_ids=bad, num_logprobs=2)
    driver.run()
    assert re.fullmatch("bbb[01]{3}", text_of(driver.tokens[1]))


class SlowCompiler:
    """Compiles when a test says so."""

    def __init__(self) -> None:
        self.future: Future[CompiledGrammar] = Future()

    def compile(self, _: str) -> "Future[CompiledGrammar]":
        return self.future


def compiled(model_directory: Path, text: str) -> CompiledGrammar:
    return GrammarCompiler(model_directory / "tokenizer.json", 32).compile(text).result(timeout=30)


def test_others_run_while_a_grammar_is_compiled(driver: Any, model_directory: Path) -> None:
    slow = driver.core._grammars = SlowCompiler()
    driver.add(1, [3], grammar="later", forks=(Fork(4, 4),))
    driver.add(2, [3], max_tokens=5)
    while 2 not in driver.finishes:
        driver.step()
    assert 1 not in driver.tokens
    figures = driver.core.idle_step()
    assert (figures.num_running, figures.num_waiting) == (0, 2)
    assert driver.core.step() is None
    assert driver.core.has_work
    slow.future.set_result(compiled(model_directory, regex("ab")))
    driver.run()
    assert driver.tokens[1] == driver.tokens[4] == ids_of("ab")


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(driver: Any, model_directory: Path) -> None:
    slow = driver.core._grammars = SlowCompiler()
    driver.add(1, [3], grammar="later", forks=(Fork(11, 11),))
    driver.add(2, [3], grammar="later", forks=(Fork(12, 12), Fork(13, 13)))
    driver.core.abort([1, 11, 2, 13])
    slow.future.set_result(compiled(model_directory, regex("ab")))
    driver.run()
    assert driver.tokens == {12: ids_of("ab")}
    assert driver.is_idle_and_empty()


def test_a_text_is_compiled_once_while_it_is_among_the_newest(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.engine.sampling.grammar._NUM_KEPT", 2)
    compiler = GrammarCompiler(model_directory / "tokenizer.json", 32)
    first = compiler.compile(regex("a"))
    assert compiler.compile(regex("b")) is not first
    assert compiler.compile(regex("a")) is first
    compiler.compile(regex("c"))  # b goes, the oldest
    assert compiler.compile(regex("a")) is first
    assert len(compiler._compiled) == 2


class BrokenMatcher:
    """Cannot go on after some tokens."""

    is_complete = False

    def __init__(self, matcher: Any, num_left: int) -> None:
        self._matcher, self._num_left = matcher, num_left
        self.num_mask_bytes = matcher.num_mask_bytes

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        if self._num_left == 0:
            raise GrammarError("too complex")
        self._num_left -= 1
        self._matcher.fill(mask)

    def consume(self, token_id: int) -> None:
        self._matcher.consume(token_id)


def test_a_grammar_that_breaks_on_the_way_ends_its_request_alone(driver: Any, model_directory: Path) -> None:
    matcher = compiled(model_directory, regex("a+")).matcher

    class Breaking:
        def matcher(self, params: AddRequest) -> BrokenMatcher:
            return BrokenMatcher(matcher(params), 3)

    slow = driver.core._grammars = SlowCompiler()
    slow.future.set_result(Breaking())  # type: ignore[arg-type]
    driver.add(1, [3], grammar="breaks")
    driver.add(2, [3], max_tokens=8)
    driver.run()
    assert driver.failures == {1: "too complex"}
    assert driver.refused == {1}
    assert driver.tokens[1] == ids_of("aaa")
    assert len(driver.tokens[2]) == 8


def request(handle: int, compiled_grammar: CompiledGrammar | None, **params: Any) -> Request:
    add = AddRequest(handle=handle, prompt_token_ids=np.ones(1, np.int32), max_tokens=10, **params)
    made = Request(add, queued_ns=0)
    made.matcher = compiled_grammar and compiled_grammar.matcher(add)
    return made


@pytest.mark.parametrize("matched", [(0, 2), (0, 1, 2), ()])
def test_a_mask_touches_its_own_rows_alone(matched: tuple[int, ...], model_directory: Path) -> None:
    grammar = compiled(model_directory, regex("[ab][0-9]"))
    requests = [request(row, grammar if row in matched else None) for row in range(3)]
    plain = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    logits = plain.clone()
    assert apply_grammars_(logits, requests) == {}
    for row in range(3):
        kept = set(ids_of("ab")) if row in matched else set(range(32))
        assert {token_id for token_id in range(32) if logits[row, token_id] > float("-inf")} == kept
        assert logits[row, sorted(kept)].equal(plain[row, sorted(kept)])


def test_a_mask_is_unpacked_alike_for_every_device(model_directory: Path) -> None:
    matcher = compiled(model_directory, regex("[ac][0-9]")).matcher(request(1, None).params)
    mask = np.empty((1, matcher.num_mask_bytes), np.uint8)
    matcher.fill(mask[0])
    is_refused = _unpack(torch.from_numpy(mask), 30)
    assert (~is_refused[0]).nonzero().flatten().tolist() == ids_of("ac")
    assert is_refused.shape == (1, 30)


def test_ids_beyond_the_tokenizers_are_never_allowed(model_directory: Path) -> None:
    tokenizer_json = model_directory / "tokenizer.json"
    grammar = GrammarCompiler(tokenizer_json, 45).compile(regex("[ab]")).result(timeout=30)
    logits = torch.zeros(1, 45)
    apply_grammars_(logits, [request(1, grammar)])
    assert (logits[0] == 0).nonzero().flatten().tolist() == ids_of("ab")


def test_no_step_runs_ahead_of_a_row_with_a_grammar(
    model_directory: Path, make_driver: MakeDriver, make_hashing_runner: Any
) -> None:
    class NoDevice:
        def launch(self, *_: Any) -> Any:
            raise AssertionError("a step was launched")

    config = EngineConfig(model=str(model_directory), max_num_seqs=4)
    params = {"grammar": regex("[a-t]{5}[0-9]+"), "max_tokens": 12, "temperature": 1.0, "seed": 3}
    plain = make_driver(config, make_hashing_runner())
    plain.add(1, [3], **params)
    plain.run()
    runner = make_hashing_runner()
    driver = make_driver(config, runner)
    driver.core = OverlappingCore(driver.core, NoDevice(), runner.block_size)
    driver.add(1, [3], **params)
    driver.run()
    assert driver.failures == {}
    assert driver.tokens == plain.tokens


@pytest.mark.parametrize("seed", range(8))
def test_random_mixes_of_grammars_forks_aborts_and_preemption_hold_every_grammar(
    seed: int, model_directory: Path, make_driver: MakeDriver, make_hashing_runner: Any
) -> None:
    rng = random.Random(seed)
    patterns = ["[a-j]{4}[0-9]", "(ab|cd)*[0-9]{2,5}", "a(b(c|d)*)?[0-9]", "[0-9a-t]{1,9}", "(t|s|r)+q"]
    config = EngineConfig(model=str(model_directory), max_num_seqs=5, max_num_batched_tokens=12)
    driver = make_driver(config, make_hashing_runner(num_blocks=16))
    chosen: dict[int, str] = {}
    aborted: set[int] = set()
    for handle in range(0, 120, 4):
        pattern = rng.choice([*patterns, ""])
        forks = tuple(Fork(handle + n, handle + n) for n in range(1, rng.choice([1, 1, 3])))
        chosen |= dict.fromkeys((handle, *(fork.handle for fork in forks)), pattern)
        driver.add(
            handle, [rng.randrange(32) for _ in range(rng.randint(1, 12))], grammar=pattern and regex(pattern),
            max_tokens=rng.choice([3, 12, 24]), temperature=rng.choice([0.0, 1.0]), seed=handle, eos_token_id=END,
            forks=forks,
        )  # fmt: skip
        for _ in range(rng.choice([0, 1, 3])):
            driver.step()
            if rng.random() < 0.1:
                aborted |= (victims := set(rng.sample(sorted(chosen), 1)))
                driver.core.abort(victims)
    driver.run()
    assert driver.failures == {}
    assert driver.is_idle_and_empty()
    assert set(chosen) == set(driver.finishes) | aborted
    num_complete = 0
    for handle, (reason, _) in driver.finishes.items():
        if chosen[handle] and reason == FinishReason.STOP:
            assert re.fullmatch(chosen[handle], text_of(driver.tokens[handle]))
            num_complete += 1
    assert num_complete > 5


def test_the_default_model_writes_whole_objects_under_preemption(make_driver: MakeDriver) -> None:
    from ringserve.server.settings.model_path import resolve

    directory = resolve(None)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": {"whitespace_flexible": False}}}]})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = tokenizer.encode("A person in JSON: ").ids
    driver = make_driver(EngineConfig(model=str(directory), kv_cache_tokens=96, block_size=4, max_model_len=96))
    for handle in range(8):
        driver.add(handle, prompt, grammar=grammar, temperature=1.0, seed=handle, max_tokens=80)
    driver.run()
    assert driver.core.idle_step().num_preemptions > 0
    for handle in range(8):
        assert driver.finishes[handle] == (FinishReason.STOP, GRAMMAR_END)
        person = json.loads(tokenizer.decode(driver.tokens[handle]))
        assert set(person) == {"name", "age"}
        assert type(person["age"]) is int
        assert person["age"] <= 99
