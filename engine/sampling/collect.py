"""What a step's outputs hold for requests that want something of their prompt: logprobs, or an embedding."""

from collections.abc import Sequence

from torch import Tensor

from ringserve.engine.sampling.logprobs import PromptLogprobs
from ringserve.engine.sampling.pooling import Pooler
from ringserve.engine.schedule.scheduler import Chunk, PromptRows
from ringserve.shm_transport.messages import Data


def collect(spans: Sequence[PromptRows], rows: Tensor) -> None:
    """Take in what has been computed for some prompts.

    Args:
        spans: Whose it is.
        rows: [sum of the spans' lengths, size], span by span.
    """
    parts = rows.split_with_sizes([span.end - span.start for span in spans])
    for span, part in zip(spans, parts, strict=True):
        request = span.request
        if request.collector is None:
            request.collector = Pooler(request.params) if request.params.pooling else PromptLogprobs(request.params)
        request.collector.extend(part)


def deliver(chunks: Sequence[Chunk]) -> list[Data]:
    """Return the messages of those prompts that are computed now, and forget what was collected for them.

    Not before, though all may be collected: if the first sequence is dropped until then, its heir is told.
    """
    messages = []
    for request in (chunk.request for chunk in chunks if chunk.is_last):
        if request.collector is not None:
            messages += request.collector.messages(request.handle)
            request.collector = None
    return messages
