"""The process that checks grammars: started once, it forks a process for each check. Imports no torch, and no asyncio.

So a check that takes long, or fails, concerns nobody else, and can be ended at any moment: when the server closes its
end of the check's connection the kernel ends the check, by SIGIO. That holds when the server dies, too. Not a pool of
processes: what had been ended would have to start again, a tenth of a second in which the next check waits.

On a check's connection the check says its pid (8 bytes); then come a length (8 bytes) and a question, JSON; then the
answer goes back. Not the pid later: the server's reading it would be a SIGIO too.
"""

import fcntl
import os
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec

from ringserve.server.errors import RequestError
from ringserve.server.grammar.check import GrammarCheck
from ringserve.server.grammar.errors import explain
from ringserve.server.grammar.structured_output import field_of, find_grammar

MAX_CPU_S = 10.0  # of a check that the server did not end; it does so far earlier
NUMBER_BYTES = 8


class Config(msgspec.Struct):
    """GrammarCheck's arguments; the process reads them from its standard input."""

    added_tokens: dict[int, str]
    vocab_size: int


class Fields(msgspec.Struct):
    """The fields of a request that say which form its output has, as the request has them."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class Question(msgspec.Struct, omit_defaults=True):
    """What is to be checked: a grammar, or the fields that ask for one."""

    fields: Fields | None = None
    grammar: str = ""
    field: str = ""  # which the grammar comes from


class Answer(msgspec.Struct, omit_defaults=True):
    """The grammar that is asked for, None for plain text; or why there is none."""

    grammar: str | None = None
    field: str = ""  # which it comes from, or which is wrong
    is_written: bool = False
    error: str = ""


def answer_to(question: Question, check: GrammarCheck) -> Answer:
    """Find the grammar that is asked for, and check it."""
    if question.fields is None:
        error = check.error_of(question.grammar)
        return Answer(error=f"{question.field}: {explain(error)}" if error else "", field=question.field)
    try:
        grammar = find_grammar(question.fields)
    except RequestError as exc:
        return Answer(error=str(exc), field=exc.param or "")
    if grammar is None:
        return Answer()
    error, field = check.error_of(grammar), field_of(grammar)
    if error:
        return Answer(error=f"{field}: {explain(error)}", field=field)
    return Answer(grammar=str(grammar), field=field, is_written=grammar.is_written)


def _run_check(connection: socket.socket, check: GrammarCheck) -> None:
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    connection.sendall(os.getpid().to_bytes(NUMBER_BYTES, "little"))
    with connection.makefile("rb") as stream:
        question = stream.read(int.from_bytes(stream.read(NUMBER_BYTES), "little"))
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)  # from here on its end is this process's end
    try:
        if connection.recv(1, socket.MSG_DONTWAIT) == b"":  # it had come before
            return
    except BlockingIOError:
        pass
    answer = msgspec.json.encode(answer_to(msgspec.json.decode(question, type=Question), check))
    fcntl.fcntl(connection, fcntl.F_SETFL, flags)  # else the server's reading would end it too
    connection.sendall(answer)


def main(orders: socket.socket, config: "Config") -> None:
    """Fork a check for each connection that comes, until the server has closed its end or is gone."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal's go to the server, which ends this
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets checks that have ended
    check = GrammarCheck(config.added_tokens, config.vocab_size)
    while True:
        _, connections, _, _ = socket.recv_fds(orders, 1, 1)
        if not connections:
            return
        with socket.socket(fileno=connections[0]) as connection:
            if os.fork() == 0:
                orders.close()
                try:
                    _run_check(connection, check)
                except Exception:
                    traceback.print_exc()  # the server knows only that there was no answer
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), msgspec.json.decode(sys.stdin.buffer.read(), type=Config))
