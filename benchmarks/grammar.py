"""What does following a grammar cost: llguidance against xgrammar? Import in s and MB; compile, mask and copy in us.

    python -m benchmarks.grammar [--quick] [--json PATH]

Then the kept one in the engine: what a step's masks cost by rows with a grammar, and what rows without one pay.

Each library in a process of its own. Import and tokenizer: wall time and resident memory. Then for each of the schemas
of tests/schemas.py: the time to compile it anew, whether it was refused, and along a text that the schema admits the
time of each token's mask, of consuming it, and of a copy of the matcher. Last, the same texts against a validator: a
library that admits what the schema does not is marked wrong. xgrammar, which brings torch, runs where it is installed.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks import report

LIBRARIES = ("llguidance", "xgrammar")
VOCAB_SIZE, EOS = 49152, 2
# Texts of the schemas on which grammars differ most: admitted or not.
CASES: tuple[tuple[dict[str, Any], str, bool], ...] = (
    ({"type": "integer", "minimum": 5, "maximum": 12}, "13", False),
    ({"type": "integer", "multipleOf": 7}, "8", False),
    ({"type": "number", "minimum": 0, "maximum": 1}, "1.5", False),
    ({"type": "number", "multipleOf": 0.25}, "0.3", False),
    ({"type": "number"}, "1e5", True),
    ({"type": "string", "maxLength": 2}, '"ab\\nc"', False),
    ({"type": "string", "maxLength": 2}, '"\U0001f600\U0001f600"', True),
    ({"type": "string", "pattern": "b"}, '"abc"', True),
    ({"type": "string", "pattern": "b"}, '"ac"', False),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, '"abcd"', False),
    ({"type": "string", "format": "date"}, '"2023-02-31"', False),
    ({"type": "string", "format": "ipv4"}, '"999.1.1.1"', False),
    ({"type": "string", "format": "uuid"}, '"x"', False),
    ({"type": "array", "uniqueItems": True}, "[1, 1]", False),
    ({"not": {"type": "string"}}, '"a"', False),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1", False),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]}, "9", False),
    ({"$ref": "#/$defs/x", "maxLength": 2, "$defs": {"x": {"type": "string"}}}, '"abc"', False),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"b":1,"a":"x"}', False),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"b":1,"\\u0061":"x"}', False),
    ({"type": "object", "patternProperties": {"^n": {"type": "integer"}}}, '{"n":"x"}', False),
    ({"type": "object", "minProperties": 1}, "{}", False),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"b":1}', False),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1}', False),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "1", False),
    ({"enum": ["é", "日本"]}, '"日本"', True),
)


class Library(Protocol):
    """One library under test."""

    def compile(self, schema: str) -> Any:
        """Return a new matcher; raises if the schema is refused."""

    def mask(self, matcher: Any) -> Any:
        """Compute the next token's mask."""

    def consume(self, matcher: Any, token_id: int) -> bool:
        """Go on by a token; False if it is not admitted."""

    def may_end(self, matcher: Any) -> bool:
        """Whether the grammar may end here."""

    def copy(self, matcher: Any) -> Any:
        """Return an independent copy."""


class LlGuidance:
    """llguidance, as the engine uses it."""

    def __init__(self, tokenizer_json: Path) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json.read_text(), n_vocab=VOCAB_SIZE, eos_token=EOS)
        self._mask = np.zeros(VOCAB_SIZE // 32, np.int32)

    def compile(self, schema: str) -> Any:
        matcher = self._library.LLMatcher(self._tokenizer, self._library.LLMatcher.grammar_from_json_schema(schema))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def mask(self, matcher: Any) -> Any:
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return self._mask

    def consume(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.consume_token(token_id))

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())

    def copy(self, matcher: Any) -> Any:
        return matcher.deep_copy()


class XGrammar:
    """xgrammar."""

    def __init__(self, tokenizer_json: Path) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_json.parent)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB_SIZE)
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)

    def compile(self, schema: str) -> Any:
        return self._library.GrammarMatcher(self._compiler.compile_json_schema(schema))

    def mask(self, matcher: Any) -> Any:
        matcher.fill_next_token_bitmask(self._mask)
        return self._mask

    def consume(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept_token(token_id))

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_completed() or matcher.accept_token(EOS))

    def copy(self, matcher: Any) -> Any:
        return matcher.fork()


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def timed(action: Callable[[], Any], into: list[float]) -> Any:
    """Do it, note how many us it took."""
    started = time.perf_counter()
    result = action()
    into.append((time.perf_counter() - started) * 1e6)
    return result


def measure(name: str, tokenizer_json: Path, *, num_schemas: int) -> dict[str, Any]:
    """Measure one library, in this process."""
    from tokenizers import Tokenizer

    from tests.schemas import all_schemas

    before_mb, started = resident_mb(), time.perf_counter()
    library: Library = {"llguidance": LlGuidance, "xgrammar": XGrammar}[name](tokenizer_json)
    loaded_s, loaded_mb = time.perf_counter() - started, resident_mb() - before_mb
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    times: dict[str, list[float]] = {"compile": [], "mask": [], "consume": [], "copy": []}
    refused = []
    for schema in all_schemas()[:num_schemas]:
        try:
            matcher = timed(partial(library.compile, json.dumps(schema)), times["compile"])
        except Exception as exc:  # each library has errors of its own
            refused.append([json.dumps(schema)[:200], str(exc)[:200]])
            continue
        _walk(library, matcher, times)
    return {
        "load_s": loaded_s, "load_mb": loaded_mb, "memory_mb": resident_mb() - before_mb, "num_refused": len(refused),
        "refused": refused, **{f"{what}_us": report.percentiles(values) for what, values in times.items()},
        "cases": {f"{json.dumps(schema)} {text}": _judge(library, tokenizer, *case) for case in CASES
                  for schema, text in (case[:2],)},
    }  # fmt: skip


def _walk(library: Library, matcher: Any, times: dict[str, list[float]]) -> None:
    """Follow a schema for 40 tokens, chosen at random among those admitted."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        mask = timed(partial(library.mask, matcher), times["mask"])
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8).ravel(), bitorder="little")
        bits[EOS] = 0
        admitted = bits.nonzero()[0]
        if not len(admitted):
            return
        token_id = int(rng.choice(admitted))
        if not timed(partial(library.consume, matcher, token_id), times["consume"]):
            return
        timed(partial(library.copy, matcher), times["copy"])


def _judge(library: Library, tokenizer: Any, schema: dict[str, Any], text: str, is_good: bool) -> str:
    try:
        matcher = library.compile(json.dumps(schema))
    except Exception:
        return "refused"
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    admits = all(library.consume(matcher, token_id) for token_id in token_ids) and library.may_end(matcher)
    return "right" if admits == is_good else "WRONG"


def measure_masks(tokenizer_json: Path, *, num_rounds: int) -> dict[str, Any]:
    """Time a step's masks on random logits: of 1 to 64 rows that all, or that none of them, follow a grammar."""
    import torch
    from tokenizers import Tokenizer

    from ringserve.engine.sampling.grammar import GrammarCompiler
    from ringserve.engine.sampling.grammar_mask import apply_grammars_
    from ringserve.engine.sampling.sampler import sample
    from ringserve.engine.schedule.request import Request
    from ringserve.shm_transport.messages import AddRequest

    def request(handle: int) -> Request:
        return Request(AddRequest(handle=handle, prompt_token_ids=np.ones(1, np.int32), max_tokens=99), queued_ns=0)

    torch.set_num_threads(1)
    compiler = GrammarCompiler(tokenizer_json, VOCAB_SIZE)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    grammar = compiler.compile(json.dumps({"grammars": [{"json_schema": schema}]})).result()
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    inside = tokenizer.encode('{"name": "Al', add_special_tokens=False).ids  # where nearly all tokens may come
    results = {}
    for num_rows in (1, 8, 64):
        plain, matched = ([request(row) for row in range(num_rows)] for _ in range(2))
        for each in matched:
            each.matcher = grammar.matcher(each.params)
            for token_id in inside:
                each.matcher.consume(token_id)
        logits = torch.randn(num_rows, VOCAB_SIZE)
        times: dict[str, list[float]] = {"all": [], "none": [], "sampling": []}
        for _ in range(num_rounds):
            timed(partial(apply_grammars_, logits.clone(), matched), times["all"])
            timed(partial(apply_grammars_, logits.clone(), plain), times["none"])
            timed(partial(sample, logits.clone(), plain), times["sampling"])
        results[str(num_rows)] = {f"{what}_us": report.percentiles(values) for what, values in times.items()}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = report.parse_arguments(parser, "grammar")
    from ringserve.server.settings.model_path import resolve

    tokenizer_json = resolve(None) / "tokenizer.json"
    num_schemas = 40 if options.quick else 200
    if options.only:
        json.dump(measure(options.only, tokenizer_json, num_schemas=num_schemas), sys.stdout)
        return 0
    results = {}
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: left out")
            continue
        command = [sys.executable, "-m", "benchmarks.grammar", "--only", name]
        output = subprocess.run(
            command + ["--quick"] * options.quick, stdout=subprocess.PIPE, check=True, text=True
        ).stdout
        results[name] = json.loads(output[output.index("{") :])
        _print(name, results[name])
    masks = measure_masks(tokenizer_json, num_rounds=50 if options.quick else 500)
    for num_rows, result in masks.items():
        p50 = {what: result[f"{what}_us"]["p50"] for what in ("all", "none", "sampling")}
        print(f"{num_rows} rows: " + ", ".join(f"{what} {us:.1f} us" for what, us in p50.items()))
    results["masks_by_rows"] = masks
    if options.json is not None:
        report.save(options.json, "grammar", results, [])
    return 0


def _print(name: str, result: dict[str, Any]) -> None:
    print(f"{name}: load {result['load_s']:.2f} s, {result['load_mb']:.0f} MB; refused {result['num_refused']}")
    for what in ("compile", "mask", "consume", "copy"):
        figures = result[f"{what}_us"]
        print(f"  {what:8} p50 {figures['p50']:8.1f} us  p99 {figures['p99']:10.1f}  max {figures['max']:10.1f}")
    verdicts = list(result["cases"].values())
    print("  cases", {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))})


if __name__ == "__main__":
    sys.exit(main())
