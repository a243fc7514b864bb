"""Reading text that arrives in pieces, with parsers that read as if it were all there.

A parser is a generator that yields where it needs more text. What it reads depends on the characters alone, never on
how they were grouped into pieces. All of it is linear in the text.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reads = Generator[None, None, T]  # a parser: yields for more text, returns T
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_STRING_RUN = re.compile(r'[^"\\]*')
_NESTED_RUN = re.compile(r"[\s,:0-9A-Za-z+.\-]*")
_SCALAR_RUN = re.compile(r"[0-9A-Za-z+.\-]*")


def ignore(_: str) -> None:
    """Take a text and do nothing with it."""


class TextScanner:
    """The text that has arrived, up to where a parser has read it.

    From `hold` on what is read is kept, until `held` returns it: text that was not what it looked like.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None
        self._is_ended = False

    def add(self, text: str) -> None:
        """Append a piece."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        """Note that no more text comes."""
        self._is_ended = True

    def hold(self) -> None:
        """Keep what is read from here on."""
        self._held = []

    def held(self) -> str:
        """Return what was read since `hold`, "" if nothing is kept, and keep no more."""
        text, self._held = "".join(self._held or ()), None
        return text

    def take(self, size: int) -> str:
        """Read characters that are there."""
        text = self._text[self._at : self._at + size]
        self._at += len(text)
        if self._held is not None:
            self._held.append(text)
        return text

    def peek(self) -> Reads[str]:
        """Return the next character without reading it, "" at the end."""
        while self._at == len(self._text) and not self._is_ended:
            yield
        return self._text[self._at : self._at + 1]

    def try_take(self, literal: str) -> Reads[bool]:
        """Read a literal if the text goes on with it; waits only as long as that is open."""
        while True:
            text = self._text[self._at : self._at + len(literal)]
            if text == literal:
                self.take(len(literal))
                return True
            if self._is_ended or not literal.startswith(text):
                return False
            yield

    def run(self, pattern: "re.Pattern[str]", sink: Sink = ignore) -> Reads[None]:
        """Read on while characters match a pattern of the form [...]*."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            if match.end() > self._at:
                sink(self.take(match.end() - self._at))
            if self._at < len(self._text) or self._is_ended:
                return
            yield

    def space(self) -> Reads[None]:
        """Read white space."""
        yield from self.run(_SPACE)

    def until(self, marker: str, sink: Sink) -> Reads[bool]:
        """Read up to a marker, and not the marker; False if the text ends without it.

        Text is handed on as soon as it cannot be the beginning of the marker.
        """
        while True:
            found = self._text.find(marker, self._at)
            end = found if found >= 0 else len(self._text) - (0 if self._is_ended else self._num_open(marker))
            if end > self._at:
                sink(self.take(end - self._at))
            if found >= 0 or self._is_ended:
                return found >= 0
            yield

    def rest(self, sink: Sink) -> Reads[None]:
        """Read everything to the end."""
        while True:
            if self._at < len(self._text):
                sink(self.take(len(self._text) - self._at))
            if self._is_ended:
                return
            yield

    def json_string(self, sink: Sink) -> Reads[bool]:
        """Read a JSON string, raw; False where it breaks off. Escapes are handed on whole."""
        if not (yield from self.try_take('"')):
            return False
        sink('"')
        while True:
            yield from self.run(_STRING_RUN, sink)
            if (yield from self.try_take('"')):
                sink('"')
                return True
            if not (yield from self.try_take("\\")):
                return False
            escaped = yield from self.peek()
            sink("\\" + self.take(len(escaped)))

    def json_value(self, sink: Sink) -> Reads[bool]:
        """Read a JSON value, raw; False where it breaks off.

        Lenient inside of brackets: their order, commas and words are not checked, so what a model writes a little
        wrong reaches the client as it was written.
        """
        first = yield from self.peek()
        if first == '"':
            return (yield from self.json_string(sink))
        if first not in ("{", "["):
            yield from self.run(_SCALAR_RUN, sink)
            return first.isalnum() or first == "-"
        depth = 0
        while True:
            yield from self.run(_NESTED_RUN, sink)
            char = yield from self.peek()
            if char == '"':
                if not (yield from self.json_string(sink)):
                    return False
                continue
            if char == "" or char not in "{}[]":
                return False
            sink(self.take(1))
            depth += 1 if char in "{[" else -1
            if depth == 0:
                return True

    def _num_open(self, marker: str) -> int:
        """Return how many characters at the end may be the beginning of the marker."""
        text = self._text
        at = text.find(marker[0], max(self._at, len(text) - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                return len(text) - at
            at = text.find(marker[0], at + 1)
        return 0
