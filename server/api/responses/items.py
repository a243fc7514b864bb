"""Items of /v1/responses: what a client sends as `input`, in one form, and the chat messages that they mean.

Knows no HTTP and no store. Where a client may leave something out (an item's type, its id, content as a list), the
item gets it here, so that it can be listed as the openai SDK types it.
"""

import secrets
from typing import Any, Literal, TypeVar

import msgspec

from ringserve.server.chat.messages import ChatMessage
from ringserve.server.errors import RequestError, shown
from ringserve.server.http.body_errors import wrong_item
from ringserve.server.text.json_size import check_json_size

Item = dict[str, Any]
REFERENCE = "item_reference"

_TEXT_PARTS = ("input_text", "output_text", "text")


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any] | None
    id: str | None = None


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class _FunctionCallOutput(msgspec.Struct):
    call_id: str
    output: str | list[Any]
    id: str | None = None


class _ReasoningText(msgspec.Struct):
    type: Literal["summary_text", "reasoning_text"]
    text: str


class _Reasoning(msgspec.Struct):
    summary: list[_ReasoningText] | None = None
    content: list[_ReasoningText] | None = None
    id: str | None = None


class _Reference(msgspec.Struct):
    id: str


T = TypeVar("T")


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess: who knows it may read what it names."""
    return f"{prefix}_{secrets.token_hex(24)}"


def normalize(given: str | list[Any] | None) -> list[Item]:
    """Return `input` as items, each with its id and type.

    Raises:
        RequestError: If there are none, or one is of no kind that is supported.
    """
    if isinstance(given, str):
        return [_message_item("user", [{"type": "input_text", "text": given}], None)]
    if not given:
        raise RequestError("input is missing or empty: a text, or at least one item", param="input")
    return [_normalize_item(item, f"input[{i}]") for i, item in enumerate(given)]


def made_ids(given: str | list[Any] | None, items: list[Item]) -> tuple[str, ...]:
    """Return the ids that `normalize` has made, but for those that the client chose."""
    if not isinstance(given, list):
        return tuple(item["id"] for item in items)
    return tuple(item["id"] for item, source in zip(items, given, strict=True) if not source.get("id"))


def references(items: list[Item]) -> dict[str, int]:
    """Return the ids of stored items that are to stand in the places of references, and these places.

    Raises:
        RequestError: If an item is named twice.
    """
    places: dict[str, int] = {}
    for i, item in enumerate(items):
        if item["type"] == REFERENCE and places.setdefault(item["id"], i) != i:
            raise RequestError(f"input[{i}].id is {shown(item['id'])} for the second time: name it once", param="input")
    return places


def chat_messages(instructions: str | None, items: list[Item]) -> list[ChatMessage]:
    """Return the messages for the chat template: a model's text and the calls that follow it are one message.

    Reasoning items are left out: templates drop the reasoning of earlier turns.
    """
    messages = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
    for item in items:
        kind = item["type"]
        if kind == "message":
            messages.append(ChatMessage(role=item["role"], content=_text(item["content"])))
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            content = _text(item["output"])
            messages.append(ChatMessage(role="tool", content=content, tool_call_id=item["call_id"]))
    return messages


def turn_starts(items: list[Item]) -> list[int]:
    """Return where the user's messages are, but for one that comes first: from each, the rest is a conversation."""
    return [i for i, item in enumerate(items) if i > 0 and item.get("role") == "user"]


def _add_call(messages: list[ChatMessage], item: Item) -> None:
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant", content=None))
    message = messages[-1]
    function = {"name": item["name"], "arguments": item["arguments"]}
    message.tool_calls = [
        *(message.tool_calls or ()), {"id": item["call_id"], "type": "function", "function": function}
    ]  # fmt: skip


def _normalize_item(item: Any, where: str) -> Item:
    if not isinstance(item, dict):
        raise RequestError(f"{where} is {shown(item)}: must be an item, an object", param="input")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else REFERENCE if "id" in item else None
    if kind == REFERENCE:
        return {"type": kind, "id": _convert(item, _Reference, where).id}
    if kind == "message":
        message = _convert(item, _Message, where)
        part_kind = "output_text" if message.role == "assistant" else "input_text"
        content = _parts(message.content, part_kind, f"{where}.content")
        return _message_item(message.role, content, message.id)
    if kind == "function_call":
        call = _convert(item, _FunctionCall, where)
        check_json_size(call.arguments.encode(), f"{where}.arguments", param=f"{where}.arguments")
        return {
            "id": call.id or new_id("fc"), "type": kind, "status": call.status or "completed", "call_id": call.call_id,
            "name": call.name, "arguments": call.arguments,
        }  # fmt: skip
    if kind == "function_call_output":
        answer = _convert(item, _FunctionCallOutput, where)
        output = answer.output
        if not isinstance(output, str):
            output = _parts(output, "input_text", f"{where}.output")
        return {
            "id": answer.id or new_id("fco"), "type": kind, "status": "completed", "call_id": answer.call_id,
            "output": output,
        }  # fmt: skip
    if kind == "reasoning":
        reasoning = _convert(item, _Reasoning, where)
        parts = msgspec.to_builtins({"summary": reasoning.summary or [], "content": reasoning.content or []})
        return {"id": reasoning.id or new_id("rs"), "type": kind, **parts}
    raise RequestError(
        f"{where}.type is {shown(kind)}: this server has message, function_call, function_call_output, reasoning and "
        "item_reference",
        param="input",
    )


def _message_item(role: str, content: list[dict[str, Any]], item_id: str | None) -> Item:
    return {
        "id": item_id or new_id("msg"), "type": "message", "status": "completed", "role": role, "content": content
    }  # fmt: skip


def _convert(item: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as exc:
        raise wrong_item(item, where, kind, str(exc)) from exc


def _parts(content: str | list[Any] | None, kind: str, where: str) -> list[dict[str, Any]]:
    """Return content as parts of one kind of text; null is none."""
    texts = [content] if isinstance(content, str) else [_part_text(part, where) for part in content or ()]
    extra: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **extra} for text in texts]


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal") if kind == "refusal" else part.get("text") if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise RequestError(
            f"{where} has a part {shown(part)}: only text is supported, as input_text, output_text or refusal",
            param="input",
        )
    return text


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
