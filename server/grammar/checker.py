"""Finds and checks the grammars of requests before anything is generated, in processes that can be ended.

A hostile grammar keeps nobody waiting: a check that is not done at once goes on at low priority beside the others, few
such at a time, for a bounded time; and it ends with the request that it is for. Loop thread only.
"""

import asyncio
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from ringserve.server.errors import OverloadedError, RequestError
from ringserve.server.grammar.check_process import NUMBER_BYTES, Answer, Config, Fields, Question
from ringserve.server.grammar.structured_output import Grammar, StructuredFields, field_of, has_structure
from ringserve.server.held_signals import held_signals
from ringserve.server.text.tokenizer import Tokenizer

_NUM_KEPT = 128  # answers, good ones and refusals; a request's fields have one, and its grammar
_NUM_QUICK = 8  # checks at once that have begun just now; others wait
_QUICK_S = 0.03  # from then on a check is a long one; ordinary ones take a few milliseconds
_NUM_LONG = 12
_LONG_S = 5.0  # 1,000 optional properties take 0.1 s
_LOW_PRIORITY = 19  # nice: next to none of the time of those that are quick, where all cores are busy
_MODULE = "ringserve.server.grammar.check_process"
_TOO_LONG = f"its check takes more than {_LONG_S:g} s: simplify it, with shorter repetitions or fewer alternatives"
_CRASHED = "its check has failed: simplify it, with shorter repetitions or fewer alternatives"


class GrammarChecker:
    """For one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._process = _CheckProcess(tokenizer)
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()  # the newest last, by their questions' digests
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quick = asyncio.Semaphore(_NUM_QUICK)  # of that loop
        self._num_long = 0

    def start(self) -> None:
        """Start the process before it is needed, so that the first grammar does not wait for it."""
        self._process.start()

    async def find(self, fields: StructuredFields) -> str:
        """Return the grammar that a request asks for, checked; "" for plain text.

        Raises:
            RequestError: Naming the field at fault.
            OverloadedError: If it takes long to check, and others that do are being checked.
        """
        if not has_structure(fields):
            return ""
        given = Fields(**{name: getattr(fields, name) for name in Fields.__struct_fields__})
        answer = await self._answer_to(Question(fields=given))
        if answer.error:
            raise RequestError(answer.error, param=answer.field)
        if answer.grammar is None:
            return ""
        grammar = Grammar(answer.grammar)
        grammar.field, grammar.is_written = answer.field, answer.is_written
        self._remember(Question(grammar=answer.grammar, field=answer.field), Answer(field=answer.field))
        return grammar

    async def check(self, grammar: str) -> None:
        """Return if the engine can follow a grammar.

        Raises:
            RequestError: If it cannot, naming the field that the grammar comes from.
            OverloadedError: As `find`.
        """
        answer = await self._answer_to(Question(grammar=str(grammar), field=field_of(grammar)))
        if answer.error:
            parts = grammar.parts if isinstance(grammar, Grammar) else tuple
            for part in await asyncio.to_thread(lambda: [*parts()]):
                await self.check(part)
            raise RequestError(answer.error, param=answer.field)

    async def _answer_to(self, question: Question) -> Answer:
        encoded = msgspec.json.encode(question)
        answer = self._answers.get(hashlib.sha256(encoded).digest()) or await self._ask(encoded)
        if answer is None:
            return _refusal(question, _CRASHED)  # not remembered: it may have been the system's doing
        if answer.error == _TOO_LONG:
            answer = _refusal(question, _TOO_LONG)
        self._remember(question, answer)
        return answer

    def _remember(self, question: Question, answer: Answer) -> None:
        key = hashlib.sha256(msgspec.json.encode(question)).digest()
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > _NUM_KEPT:
            self._answers.popitem(last=False)

    async def _ask(self, question: bytes) -> Answer | None:
        """Return a check's answer; None if it has died."""
        async with contextlib.AsyncExitStack() as ends:
            async with self._places():
                try:
                    check = await ends.enter_async_context(self._process.check(question))
                except EOFError:
                    return None
                is_done = await check.wait(_QUICK_S)
            if not is_done:
                if self._num_long >= _NUM_LONG:
                    raise OverloadedError(f"{_NUM_LONG} grammars that take long to check are being checked: try again")
                self._num_long += 1
                try:
                    check.lower_priority()
                    is_done = await check.wait(_LONG_S)
                finally:
                    self._num_long -= 1
            return check.answer() if is_done else Answer(error=_TOO_LONG)

    def _places(self) -> asyncio.Semaphore:
        """Return the running loop's: the library may be used in one asyncio.run after the other."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._quick = loop, asyncio.Semaphore(_NUM_QUICK)
        return self._quick


def _refusal(question: Question, reason: str) -> Answer:
    given = question.fields and [
        name for name in Fields.__struct_fields__ if getattr(question.fields, name) is not None
    ]
    field = given[0] if given else question.field
    return Answer(error=f"{field}: {reason}", field=field)


@dataclass(frozen=True, slots=True)
class _Check:
    """A check that runs."""

    pid: int
    reading: "asyncio.Task[bytes]"

    async def wait(self, limit_s: float) -> bool:
        """Wait until it has ended, or for so long; return whether it has."""
        done, _ = await asyncio.wait([self.reading], timeout=limit_s)
        return bool(done)

    def answer(self) -> Answer | None:
        """Return what it said before its end."""
        text = b"" if self.reading.exception() else self.reading.result()
        return msgspec.json.decode(text, type=Answer) if text else None

    def lower_priority(self) -> None:
        """Let others go first."""
        with contextlib.suppress(OSError):  # it has ended just now
            os.setpriority(os.PRIO_PROCESS, self.pid, _LOW_PRIORITY)


class _CheckProcess:
    """The process that checks are forked from. Started again if it has died; ended with this object."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._config = Config(added_tokens=tokenizer.added_tokens(), vocab_size=tokenizer.vocab_size)
        self._orders: socket.socket | None = None
        self._end: weakref.finalize[..., _CheckProcess] | None = None

    def start(self) -> socket.socket:
        """Return where connections for checks go; start the process if there is none."""
        if self._orders is not None:
            return self._orders
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("config"), "w+b") as config, held_signals():
            config.write(msgspec.json.encode(self._config))
            config.seek(0)
            # -P: no module of the folder that the user happens to be in is run
            command = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())]
            process = subprocess.Popen(command, stdin=config, pass_fds=[theirs.fileno()])
            self._end = weakref.finalize(self, _end, process, orders)
        self._orders = orders
        return orders

    @contextlib.asynccontextmanager
    async def check(self, question: bytes) -> AsyncIterator[_Check]:
        """Run a check; at the end it has ended, or is ended.

        Raises:
            EOFError: If it has died before it began.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._send(theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        reading = None
        try:
            pid = int.from_bytes(await reader.readexactly(NUMBER_BYTES), "little")
            writer.write(len(question).to_bytes(NUMBER_BYTES, "little") + question)
            reading = asyncio.create_task(reader.read())
            yield _Check(pid, reading)
        finally:
            if reading is not None:
                reading.cancel()
            writer.transport.abort()

    def _send(self, connection: socket.socket) -> None:
        try:
            socket.send_fds(self.start(), [b"c"], [connection.fileno()])
        except OSError:  # it has died
            self._forget()
            socket.send_fds(self.start(), [b"c"], [connection.fileno()])

    def _forget(self) -> None:
        if self._end is not None:
            self._end()
        self._orders = self._end = None


def _end(process: "subprocess.Popen[bytes]", orders: socket.socket) -> None:
    orders.close()
    process.kill()
    process.wait()
