"""Messages of a chat as requests write them, and as chat templates expect them."""

from typing import Annotated, Any

import msgspec

from ringserve.server.errors import RequestError, shown
from ringserve.server.text.json_size import check_json_size

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ChatMessage(msgspec.Struct):
    """One message; fields that the template may use are kept."""

    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def to_template(self, place: int) -> dict[str, Any]:
        """Return the message as templates expect it: content a string, "" where there is none.

        Args:
            place: Of the message in its chat, for errors.

        Raises:
            RequestError: If a content part is not text, or a tool call not of a function.
        """
        message: dict[str, Any] = {"role": self.role, "content": content_text(self.content, f"messages[{place}]")}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                _tool_call(call, f"messages[{place}].tool_calls[{i}]") for i, call in enumerate(self.tool_calls)
            ]
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        return message


def content_text(content: "str | list[Any] | None", where: str) -> str:
    """Return a message's content as one text; parts are joined by line ends.

    Raises:
        RequestError: If a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.get(_TEXT_PARTS.get(str(part.get("type")), "")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RequestError(
                f'{where} has a content part {shown(part)}: only {{"type": "text", "text": ...}} is supported',
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call with its arguments decoded: templates write them as JSON themselves."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f'{where} is {shown(call)}: must be {{"id", "type": "function", "function": {{"name", "arguments"}}}}',
            param="messages",
        )
    if not isinstance(call.get("id"), str | None):
        raise RequestError(f"{where}.id is {shown(call['id'])}: must be a text", param="messages")
    if call.get("type") not in (None, "function"):
        raise RequestError(f"{where}.type is {shown(call['type'])}: must be function", param="messages")
    arguments = decode_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def decode_arguments(given: Any, where: str, *, param: str = "messages") -> dict[str, Any]:
    """Return what the arguments of a tool call hold.

    A string is whatever a model has written, and a conversation must go on after a call that was cut or is no JSON:
    what is no object is an empty one. Templates go through its keys. Rejected: the text under a key, which models copy.

    Args:
        given: An object, or a string; null for none.
        where: What errors call it.
        param: The field at fault.

    Raises:
        RequestError: If it is neither, or holds too much.
    """
    if isinstance(given, str):
        raw = given.encode()
        check_json_size(raw, where, param=param)
        try:
            arguments = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return {}
        return arguments if isinstance(arguments, dict) else {}
    if not isinstance(given, dict | None):
        raise RequestError(f"{where} is {shown(given)}: must be a string, or an object", param=param)
    return given or {}
