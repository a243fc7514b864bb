"""Splits a model's text into content and tool calls, as it arrives; its format is server/chat/tool_formats.py's.

A call begins once its name and the brace of its arguments are read; from there on its arguments are streamed as the
model writes them. What looked like a call and was none is given as content, markers and all. Arguments that break off
or are no JSON stay what the model wrote, up to where its format would end them: clients have to check them anyway.
White space between calls, and around them where there is nothing else, belongs to the format and is no content.
"""

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ringserve.server.chat.text_scanner import Reads, TextScanner

_ARGUMENTS = ("arguments", "parameters")
_BEFORE_NAME = ("name", "type", "id", *_ARGUMENTS)


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """Something new of one tool call. The first of a call has its id and name, and no arguments; later ones neither."""

    index: int
    id: str | None
    name: str | None
    arguments: str


TextOrCall = str | ToolCallDelta  # texts and calls stand in the order in which the model wrote them


def call_id() -> str:
    """Return a new id, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSyntax:
    """What is written around calls, each an object with a name and arguments, where a grammar makes a model write them.

    Attributes:
        opening: Before all calls; `closing` after them, and `separator` between two.
        call_opening: Before each call; `call_closing` after it.
        arguments: The key of the arguments.
    """

    opening: str = ""
    call_opening: str = ""
    arguments: str = "arguments"
    call_closing: str = ""
    separator: str = ""
    closing: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        read: Reads a whole output.
        markers: Texts of special tokens that it must see.
        new_id: Makes the id of a call.
        syntax: For a grammar; None where calls are not the model's own choice.
    """

    read: "Callable[[ToolParser], Reads[None]]"
    markers: tuple[str, ...] = ()
    new_id: Callable[[], str] = call_id
    syntax: CallSyntax | None = None


@dataclass(slots=True)
class _Fields:
    """What has been read of a call's object."""

    name: str = ""
    arguments: str = ""
    has_begun: bool = False
    is_whole: bool = False


class ToolParser:
    """The state of one choice. `push` and `finish` are its user's, everything else its format's.

    Args:
        form: How the model writes calls.
        names: The request's tools, for formats where only its name tells a call from other JSON.

    Attributes:
        text: What has arrived and is not read yet.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str] = frozenset()) -> None:
        self.text = TextScanner()
        self.names = names
        self._new_id = form.new_id
        self._parts: list[TextOrCall] = []
        self._space = ""  # white space that is content only if something follows it
        self._is_blank = True  # whether nothing but white space has come since the beginning, or the last call
        self._num_calls = 0
        self._reading = form.read(self)

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def push(self, text: str) -> tuple[TextOrCall, ...]:
        """Take a piece of text."""
        self.text.add(text)
        next(self._reading)
        return self._collected()

    def finish(self) -> tuple[TextOrCall, ...]:
        """Return what was held back."""
        self.text.end()
        next(self._reading, None)
        if not self.has_tool_calls:
            self._parts.append(self._space)
        return self._collected()

    def give(self, text: str) -> None:
        """Take text as content."""
        if self._is_blank:
            text, self._space = self._space + text, ""
            if text == "" or text.isspace():
                self._space = text
                return
            self._is_blank = False
        self._parts.append(text)

    def give_held(self) -> None:
        """Take back what looked like a call."""
        self.give(self.text.held())

    def begin(self, name: str) -> None:
        """Begin a call, of which all that is held was a part."""
        self.text.held()
        self._space, self._is_blank = "", True
        self._parts.append(ToolCallDelta(self._num_calls, self._new_id(), name, ""))
        self._num_calls += 1

    def argue(self, text: str) -> None:
        """Take text as more arguments of the newest call."""
        newest = self._parts[-1] if self._parts else None
        if isinstance(newest, ToolCallDelta) and newest.id is None:
            self._parts[-1] = msgspec.structs.replace(newest, arguments=newest.arguments + text)
        else:
            self._parts.append(ToolCallDelta(self._num_calls - 1, None, None, text))

    def arguments(self, end_marker: str | None) -> Reads[None]:
        """Read the arguments of the call that has begun; where they are broken, up to the marker, or the end."""
        if (yield from self.text.json_value(self.argue)):
            return
        if end_marker is None:
            yield from self.text.rest(self.argue)
        else:
            yield from self.text.until(end_marker, self.argue)

    def call(self, end_marker: str | None, is_name: Callable[[str], bool] = bool) -> Reads[bool]:
        """Read an object with a name and arguments; False if it is none, with all that was read still held.

        Args:
            end_marker: What ends a call in this format, if anything.
            is_name: Whether a name makes it a call.
        """
        fields = _Fields()
        yield from self._object(fields, end_marker, is_name)
        if not fields.has_begun:
            return fields.is_whole and is_name(fields.name) and self._give_whole(fields)
        if fields.is_whole:
            self.text.held()
        self.give_held()
        return True

    def call_list(self, end_marker: str | None) -> Reads[None]:
        """Read calls up to the end of their list, or to what is none, which stays held."""
        text = self.text
        while True:
            yield from text.space()
            if not (yield from self.call(end_marker)):
                return
            text.hold()
            yield from text.space()
            if (yield from text.try_take("]")):
                text.held()
                return
            if not (yield from text.try_take(",")):
                return

    def _object(self, fields: _Fields, end_marker: str | None, is_name: Callable[[str], bool]) -> Reads[None]:
        """Read up to the end of the object, or to where it cannot be a call."""
        text, separator = self.text, "{"
        while (yield from text.try_take(separator)):
            separator = ","
            yield from text.space()
            key = yield from self._key()
            if key is None or not (fields.name or key in _BEFORE_NAME):
                return
            if not (yield from self._field(fields, key, end_marker)):
                return
            if key == "name" and not is_name(fields.name):
                return
            yield from text.space()
        fields.is_whole = separator == "," and (yield from text.try_take("}"))

    def _key(self) -> Reads[str | None]:
        """Read a key, its colon and the space after it; None if there is none."""
        text, raw = self.text, list[str]()
        if not (yield from text.json_string(raw.append)):
            return None
        yield from text.space()
        if not (yield from text.try_take(":")):
            return None
        yield from text.space()
        return _text_of("".join(raw))

    def _field(self, fields: _Fields, key: str, end_marker: str | None) -> Reads[bool]:
        """Read a field's value; False where it is broken."""
        if fields.name and not fields.has_begun and key in _ARGUMENTS and (yield from self.text.peek()) == "{":
            fields.has_begun = True
            self.begin(fields.name)
            yield from self.arguments(end_marker)
            self.text.hold()
            return True
        raw: list[str] = []
        if not (yield from self.text.json_value(raw.append)):
            return False
        if key == "name":
            fields.name = _text_of("".join(raw))
        elif key in _ARGUMENTS:
            fields.arguments = "".join(raw)
        return True

    def _give_whole(self, fields: _Fields) -> bool:
        """Give a call whose arguments came before its name, are missing, null, or an object in a string."""
        arguments = fields.arguments
        if arguments.startswith('"'):
            arguments = _text_of(arguments)
        elif arguments in ("", "null"):
            arguments = "{}"
        if not arguments.startswith("{"):
            return False
        self.begin(fields.name)
        self.argue(arguments)
        return True

    def _collected(self) -> tuple[TextOrCall, ...]:
        """Take what there is, texts that follow one another as one: thousands come where much could begin a call."""
        collected: list[TextOrCall] = []
        for kind, group in itertools.groupby(self._parts, type):
            parts = [*group]
            collected += filter(None, ["".join(map(str, parts))]) if kind is str else parts
        self._parts = []
        return tuple(collected)


def _text_of(raw: str) -> str:
    """Return the value of a JSON string; "" if it is none."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return ""
