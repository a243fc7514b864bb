"""Whole answers of the generating endpoints, as vLLM gives them: every field, null where there is nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ringserve.server.api.render.chunks import Shown, StreamIdentity, Usage
from ringserve.server.api.render.logprob_format import PromptLogprobs
from ringserve.server.generation.input_processor import ProcessedRequest
from ringserve.server.generation.outputs import CompletionOutput, RequestOutput
from ringserve.server.text.token_names import TokenNames

ChoiceFormat = Callable[[CompletionOutput, Shown], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a whole answer is made of."""

    identity: StreamIdentity
    requests: list[ProcessedRequest]
    outputs: list[RequestOutput]  # of `requests`, with all their sequences
    shown: Shown
    names: TokenNames
    num_prompt_logprobs: int | None  # asked for; the outputs can have more


def chat_answer(answer: Answer, choice: "ChoiceFormat | None" = None) -> dict[str, Any]:
    """Return the body of /v1/chat/completions."""
    shown, output = answer.shown, answer.outputs[0]
    return _answer(answer, "chat.completion", choice or chat_choice) | {
        "prompt_logprobs": _prompt_logprobs(output, answer),
        "prompt_token_ids": shown.prompt_token_ids and shown.prompt_token_ids[0],
    }


def completion_answer(answer: Answer) -> dict[str, Any]:
    """Return the body of /v1/completions."""
    body = _answer(answer, "text_completion", completion_choice)
    per_prompt = answer.requests[0].params.n
    prompts = [
        {
            "prompt_logprobs": _prompt_logprobs(output, answer),
            "prompt_token_ids": output.prompt_token_ids if answer.shown.prompt_token_ids else None,
        }
        for output in answer.outputs
    ]
    for place, choice in enumerate(body["choices"]):
        choice |= prompts[place // per_prompt]
    return body


def chat_choice(output: CompletionOutput, shown: Shown) -> dict[str, Any]:
    """Return one choice with a plain message."""
    message = {
        "role": "assistant", "content": output.text, "refusal": None, "annotations": None, "audio": None,
        "function_call": None,
    }  # fmt: skip
    return {"index": output.index, "message": message} | _choice_rest(output, shown)


def completion_choice(output: CompletionOutput, shown: Shown) -> dict[str, Any]:
    """Return one choice with its text."""
    return {"index": output.index, "text": output.text} | _choice_rest(output, shown)


def _choice_rest(output: CompletionOutput, shown: Shown) -> dict[str, Any]:
    return {
        "logprobs": msgspec.Raw(shown.logprobs_json(output)), "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason, "token_ids": msgspec.Raw(shown.token_ids_json(output)),
    }  # fmt: skip


def _answer(answer: Answer, kind: str, choice: ChoiceFormat) -> dict[str, Any]:
    identity = answer.identity
    outputs = [output for request_output in answer.outputs for output in request_output.outputs]
    usage = Usage(
        prompt_tokens=sum(len(request.prompt_token_ids) for request in answer.requests),
        completion_tokens=sum(output.num_tokens for output in outputs),
        cached_tokens=sum(request_output.num_cached_tokens for request_output in answer.outputs),
    )
    return {
        "id": identity.response_id, "object": kind, "created": identity.created, "model": identity.model,
        "choices": [choice(output, answer.shown) for output in outputs], "service_tier": None,
        "system_fingerprint": identity.fingerprint, "usage": msgspec.Raw(usage.to_json()),
    }  # fmt: skip


def _prompt_logprobs(output: RequestOutput, answer: Answer) -> "msgspec.Raw | None":
    known, num_wanted = PromptLogprobs.of(output.arrays), answer.num_prompt_logprobs
    return None if known is None or num_wanted is None else msgspec.Raw(known.to_json(num_wanted, answer.names))
