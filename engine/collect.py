"""What a step's outputs hold for requests that want something of their prompt: logprobs, or an embedding."""

from collections.abc import Sequence

from torch import Tensor

from engine.logprobs import PromptLogprobs
from engine.pooling import Pooler
from engine.scheduler import PromptRows
from shm_transport.messages import Data


def collect_prompt_logprobs(spans: Sequence[PromptRows], logits: Tensor) -> list[Data]:
    """Take in the logits of prompt tokens.

    Args:
        spans: Whose they are.
        logits: [sum of the spans' lengths, vocab_size] fp32, span by span.

    Returns:
        The messages of those prompts that are complete now.
    """
    messages = []
    for span, part in zip(spans, _split(spans, logits), strict=True):
        request = span.request
        collector = request.collector or PromptLogprobs(request.params)
        assert isinstance(collector, PromptLogprobs)
        collector.extend(part)
        request.collector = None if collector.is_complete else collector
        if collector.is_complete:
            messages += collector.messages(request.handle)
    return messages


def collect_embeddings(spans: Sequence[PromptRows], hidden_states: Tensor) -> list[Data]:
    """Take in the final hidden states of prompt tokens, [sum of the spans' lengths, hidden_size]; as above."""
    messages = []
    for span, part in zip(spans, _split(spans, hidden_states), strict=True):
        request = span.request
        collector = request.collector or Pooler(request.params)
        assert isinstance(collector, Pooler)
        collector.extend(part)
        request.collector = collector
        if span.is_last:
            messages.append(collector.message(request.handle))
    return messages


def _split(spans: Sequence[PromptRows], rows: Tensor) -> Sequence[Tensor]:
    return rows.split_with_sizes([span.end - span.start for span in spans])
