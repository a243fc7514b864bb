"""From the body of POST /v1/responses to the engine's request: the conversation, the prompt, the grammar. No HTTP."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringserve.server.api.response_store import ResponseStore, encode_items, find_items
from ringserve.server.api.responses.items import REFERENCE, Item, made_ids, new_id, normalize, references, turn_starts
from ringserve.server.api.responses.protocol import LOGPROBS, ResponseRequest
from ringserve.server.api.serving import Serving
from ringserve.server.chat.parser import ChatParsing
from ringserve.server.chat.tool_grammar import answer_grammar
from ringserve.server.chat.tools import ToolUse
from ringserve.server.errors import ContextLengthError, NotFoundError, RequestError, shown
from ringserve.server.generation.input_processor import GenerateRequest, ProcessedRequest
from ringserve.server.generation.outputs import OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.grammar.structured_output import Grammar
from ringserve.server.workers import run_near

# What the errors of other rooms call a field, and what this endpoint does.
_FIELD_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}
_WHY_GONE = "was never stored (store, --max-stored-responses), has been deleted, or had to make room for newer ones"
_INLINE_ITEMS = 128  # more are processed on a thread: so many take about half a millisecond
_BYTES_PER_ITEM = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A request, read and checked.

    Attributes:
        items: All that the response is generated from: the previous responses' items, then the request's.
        item_ids: Of the request's items, those that were made here.
        stored_items: The items, encoded, for the store; None: the response is not to be stored.
        params: What it asks for; a grammar and the parser's markers come with the prompt.
        grammar: Of `text.format`, or of vLLM's fields; "" for plain text.
        use: What it wants of its tools.
    """

    serving: Serving
    body: ResponseRequest
    response_id: str
    items: list[Item]
    item_ids: tuple[str, ...]
    stored_items: bytes | None
    params: SamplingParams
    grammar: str
    use: ToolUse | None
    arrival_ns: int
    deadline_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What goes to the engine, and how to read what comes back."""

    request: ProcessedRequest
    parsing: ChatParsing | None


async def make_plan(
    serving: Serving, body: ResponseRequest, *, arrival_ns: int, deadline_s: float | None = None
) -> Plan:
    """Find what a checked request builds on; times as GenerateRequest's.

    Raises:
        RequestError: Naming the field that is wrong.
        NotFoundError: If there is no such previous response, or item.
    """
    with _own_field_names():
        params, use = body.params(serving.llm.model.sampling_defaults), body.tool_use()
    own_items = await _own_items(body)
    items = await _conversation(serving.responses, body, own_items)
    grammar = await _grammar(serving, body)
    is_stored = serving.responses.is_enabled and body.store is not False
    stored_items = await run_near(len(items) <= _INLINE_ITEMS, encode_items, items) if is_stored else None
    return Plan(
        serving=serving, body=body, response_id=new_id("resp"), items=items,
        item_ids=made_ids(body.input, own_items), stored_items=stored_items, params=params, grammar=grammar, use=use,
        arrival_ns=arrival_ns, deadline_s=deadline_s,
    )  # fmt: skip


async def prepare(plan: Plan) -> Prepared:
    """Return what goes to the engine, without the oldest turns where they do not fit and `truncation` allows it.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    with _own_field_names():
        if plan.body.truncation != "auto":
            return await _prepare_from(plan, 0)
        starts, low = [0, *turn_starts(plan.items)], 0
        high = len(starts) - 1
        while low < high:  # the first start from which the rest fits
            middle = (low + high) // 2
            if await _fits(plan, starts[middle]):
                high = middle
            else:
                low = middle + 1
        return await _prepare_from(plan, starts[low])


def not_found(response_id: str, name: str) -> NotFoundError:
    """Return the error of a response that is not there."""
    return NotFoundError(f"{name} is {shown(response_id)}: there is no such response; it {_WHY_GONE}", param=name)


async def _own_items(body: ResponseRequest) -> list[Item]:
    """Return the request's items, references among them."""
    if isinstance(body.input, list):
        return await asyncio.to_thread(normalize, body.input)  # calls hold arguments, whose size is not known
    return normalize(body.input)


async def _resolved(store: ResponseStore, items: list[Item]) -> list[Item]:
    """Return the items with those that are referred to in the places of the references."""
    places = references(items)
    if not places:
        return items
    found = await asyncio.to_thread(find_items, store.holders(places), places)
    for item_id, place in places.items():
        if item_id not in found:
            raise NotFoundError(
                f"input[{place}].id is {shown(item_id)}: there is no such item; its response {_WHY_GONE}", param="input"
            )
    return [found[item["id"]] if item["type"] == REFERENCE else item for item in items]


async def _conversation(store: ResponseStore, body: ResponseRequest, items: list[Item]) -> list[Item]:
    """Return all items that the response is generated from: the previous responses', then the request's."""
    items = await _resolved(store, items)
    if body.previous_response_id is None:
        return items
    previous = store.get(body.previous_response_id)
    if previous is None:
        raise not_found(body.previous_response_id, "previous_response_id")
    is_short = previous.num_bytes // _BYTES_PER_ITEM <= _INLINE_ITEMS
    return await run_near(is_short, previous.conversation) + items


def _num_pieces(items: list[Item]) -> int:
    """Return how many items they count for, as calls have arguments that are decoded."""
    return len(items) + sum(len(item.get("arguments", "")) for item in items) // _BYTES_PER_ITEM


async def _grammar(serving: Serving, body: ResponseRequest) -> str:
    """Return the grammar of `text.format`, or of vLLM's own fields, checked; "" for plain text."""
    grammars = serving.llm.input_processor.grammars
    other = await grammars.find(body)
    if not body.has_format:
        return other
    if other:
        field = other.field if isinstance(other, Grammar) else "text.format"
        raise RequestError(
            f"text.format and {field} are set: the output can have one form, leave one out", param="text.format"
        )
    grammar = await asyncio.to_thread(body.format_grammar)
    await grammars.check(grammar)
    return grammar


async def _prepare_from(plan: Plan, start: int) -> Prepared:
    """Render, tokenize and validate the items from number `start` on."""
    serving, body, use = plan.serving, plan.body, plan.use
    items = plan.items[start:]
    prompt = await run_near(_num_pieces(items) <= _INLINE_ITEMS, body.chat_prompt, items)
    prompt = serving.chat.prompt(prompt, use)
    text = await serving.llm.input_processor.render_chat(prompt)
    parsing = serving.chat.parsing(use, text, include_reasoning=body.include_reasoning is not False)
    if parsing is not None and body.wants_logprobs:
        raise RequestError(
            f"include has {LOGPROBS} where the output may be tool calls or reasoning: leave it out", param="include"
        )
    request = GenerateRequest(
        request_id=plan.response_id, prompt=text, params=await _params(plan, parsing),
        kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        add_special_tokens=bool(body.add_special_tokens), priority=body.priority or 0, cache_salt=body.cache_salt or "",
        adapter=serving.adapter(body.model), deadline_s=plan.deadline_s, arrival_ns=plan.arrival_ns,
        name="input", limit_name="max_output_tokens",
    )  # fmt: skip
    return Prepared(request=await serving.llm.input_processor.process(request), parsing=parsing)


async def _params(plan: Plan, parsing: ChatParsing | None) -> SamplingParams:
    """Return the sampling parameters with the grammar and the parser's markers."""
    if parsing is None:
        return replace(plan.params, grammar=plan.grammar)
    special_token_id = plan.serving.llm.model.tokenizer.special_token_id
    grammar = await asyncio.to_thread(answer_grammar, plan.use, parsing, plan.grammar, special_token_id)
    return replace(plan.params, grammar=grammar, shown_special_tokens=parsing.markers)


async def _fits(plan: Plan, start: int) -> bool:
    """Whether the items from number `start` on leave room for the output."""
    try:
        prepared = await _prepare_from(plan, start)
    except ContextLengthError as exc:
        if exc.param != "input":  # fewer items would not help
            raise
        return False
    room = plan.serving.llm.model.max_model_len - (plan.body.max_output_tokens or 1)
    return len(prepared.request.prompt_token_ids) <= room


@contextlib.contextmanager
def _own_field_names() -> Iterator[None]:
    """Have errors name the fields as this endpoint's clients know them."""
    try:
        yield
    except RequestError as exc:
        param = exc.param or ""
        name = _FIELD_NAMES.get(param, param.replace(".function", ""))
        if name == param:
            raise
        raise type(exc)(str(exc).replace(param, name, 1), param=name) from exc
