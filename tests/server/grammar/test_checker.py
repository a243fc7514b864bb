"""The processes that check grammars: they end with whoever waits for them, and are nobody else's concern."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringserve.server.errors import OverloadedError, RequestError
from ringserve.server.grammar import checker as checker_module
from ringserve.server.grammar.checker import GrammarChecker
from ringserve.server.grammar.structured_output import ebnf, from_json_schema, regex
from ringserve.server.text.tokenizer import Tokenizer
from ringserve.shm_transport import process
from tests.server.text.byte_tokenizer import byte_tokenizer, fields

LIMIT_S = 60.0
GOOD = 'start: "a"'


def long_grammar(number: int = 0) -> str:
    """Return a grammar whose check takes a second or more."""
    return from_json_schema(
        {"type": "object", "properties": {f"p{number}_{n}": {"type": "string"} for n in range(4000)}}
    )


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> GrammarChecker:
    """A checker for which every check that takes 10 ms is a long one."""
    monkeypatch.setattr(checker_module, "_QUICK_S", 0.01)
    made = GrammarChecker(Tokenizer(byte_tokenizer(), {}))
    made.start()
    return made


def parent_of(checker: GrammarChecker) -> int:
    """Return the pid of the process that checks are forked from."""
    assert checker._process._end is not None
    (popen, _) = checker._process._end.peek()[2]  # type: ignore[index]
    return popen.pid


def checks(checker: GrammarChecker) -> list[int]:
    """Return the pids of the checks that run."""
    pid = parent_of(checker)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if process.start_time(int(child)) is not None]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(checker: GrammarChecker, *grammars: str):
    """Check grammars that take long, beside what the block does."""
    tasks = [asyncio.create_task(checker.check(grammar)) for grammar in grammars]
    await until(lambda: checker._num_long == len(tasks))
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_check_that_nobody_waits_for_ends(checker: GrammarChecker) -> None:
    async with running(checker, long_grammar()) as (task,):
        assert len(checks(checker)) == 1
        task.cancel()
        await until(lambda: checks(checker) == [])
        assert checker._num_long == 0
    await checker.check(GOOD)


async def test_long_checks_run_at_low_priority_and_short_ones_beside_them_do_not(checker: GrammarChecker) -> None:
    async with running(checker, long_grammar()):
        (pid,) = checks(checker)
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, parent_of(checker)) == os.getpriority(os.PRIO_PROCESS, 0)
        await checker.check(GOOD)
        await until(lambda: checks(checker) == [pid])


async def test_a_check_that_dies_fails_its_own_request_alone_and_is_tried_again(checker: GrammarChecker) -> None:
    async with running(checker, long_grammar(1), long_grammar(2)) as tasks:
        os.kill(min(checks(checker)), signal.SIGKILL)
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT_S)
        assert len(done) == len(pending) == 1
        with pytest.raises(RequestError, match="its check has failed"):
            await done.pop()
        assert len(checker._answers) == 0  # it is not remembered
        await checker.check(GOOD)


async def test_the_process_is_started_again_if_it_has_died(checker: GrammarChecker) -> None:
    await checker.check(GOOD)
    first = parent_of(checker)
    os.kill(first, signal.SIGKILL)
    await until(lambda: process.start_time(first) is None)
    await checker.check('start: "b"')
    assert parent_of(checker) != first


async def test_the_time_of_a_check_is_bounded_and_its_refusal_remembered(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "_LONG_S", 0.1)
    for given in ({"guided_json": {"properties": {f"p{n}": {} for n in range(4000)}, "type": "object"}}, {}):
        for _ in range(2):
            with pytest.raises(RequestError, match="its check takes more than") as caught:
                await (checker.find(fields(**given)) if given else checker.check(long_grammar()))
            assert caught.value.param == next(iter(given), "json_schema")
    assert len(checker._answers) == 2
    await until(lambda: checks(checker) == [])


async def test_more_long_checks_than_there_are_places_for_are_told_to_come_again(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "_NUM_LONG", 2)
    async with running(checker, long_grammar(1), long_grammar(2)):
        with pytest.raises(OverloadedError, match="try again"):
            await checker.check(long_grammar(3))
        await checker.check(GOOD)
        await until(lambda: len(checks(checker)) == 2)


HOSTILE = {
    "4,000 properties": lambda: long_grammar(),
    "a long alternative of patterns": lambda: from_json_schema(
        {"anyOf": [{"type": "string", "pattern": f"^(a|b){{{n}}}c*{n}$"} for n in range(2, 300)]}
    ),
    "a set difference": lambda: ebnf("start: A\nA: /(.*a.{60}){30}/ & ~/(.*b.{50}){30}/"),
    "counted repetitions": lambda: regex("((a{1,200}|b{1,200}){1,200}c?){1,200}"),
    "ambiguous rules": lambda: ebnf("start: (a | b | c)*\na: b*\nb: c* /x?/\nc: a? b? /x*/"),
    "nested arrays": lambda: from_json_schema(
        {"type": "array", "minItems": 3000, "items": {"type": "array", "minItems": 3000, "items": {"enum": [1, 12]}}}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_an_ordinary_grammar_beside_hostile_ones_is_checked(name: str, checker: GrammarChecker) -> None:
    grammar = HOSTILE[name]()
    tasks = [asyncio.create_task(checker.check(f"{grammar}{' ' * n}")) for n in range(6)]
    await asyncio.sleep(0)
    started = time.monotonic()
    await asyncio.wait_for(checker.check("start: /[a-c]+/"), LIMIT_S)
    print(f"{name}: an ordinary one beside it took {time.monotonic() - started:.3f} s")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: checks(checker) == [])


def test_a_checker_serves_one_loop_after_the_other_with_more_checks_than_places() -> None:
    checker = GrammarChecker(Tokenizer(byte_tokenizer(), {}))

    async def check_many(first: int) -> None:
        await asyncio.gather(*(checker.check(regex(f"[a-c]+{n}")) for n in range(first, first + 30)))

    asyncio.run(check_many(0))
    asyncio.run(check_many(100))


def test_the_process_holds_no_torch_and_none_of_the_servers_packages() -> None:
    names = ("torch", "transformers", "asyncio", "uvicorn", "tokenizers", "numpy")
    code = f"import sys, ringserve.server.grammar.check_process as _; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "[]\n"


DYING = """
import asyncio, os, signal
from ringserve.server.grammar import checker as module
from tests.server.grammar.test_checker import checks, long_grammar, parent_of, running, GrammarChecker, Tokenizer
from tests.server.text.byte_tokenizer import byte_tokenizer

async def main():
    module._QUICK_S = 0.01
    checker = GrammarChecker(Tokenizer(byte_tokenizer(), {}))
    checker.start()
    async with running(checker, long_grammar()):
        print(parent_of(checker), *checks(checker), flush=True)
        %s

asyncio.run(main())
"""


@pytest.fixture
def ends() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    deadline = time.monotonic() + LIMIT_S
    while any(process.start_time(pid) is not None for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "raise SystemExit(0)", "return"]
)
def test_all_of_them_end_with_the_server(end: str, ends: list[int]) -> None:
    command = [sys.executable, "-c", DYING % end]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    ends += map(int, done.stdout.split())
    assert len(ends) == 2
