"""The device that OverlappingCore launches steps on: a PagedRunner and the sampler that does not wait for it.

On a GPU the tokens come to the host by a stream of their own, beside the next step. On a CPU, where this exists for its
tests, a step is done when it is launched. The GPU's part has not been run on one yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringserve.engine.core.overlap import Tokens
from ringserve.engine.runner.paged import PagedRunner
from ringserve.engine.sampling.device_sampler import DeviceSamples, sample_on_device
from ringserve.engine.schedule.batch import Batch
from ringserve.engine.schedule.request import Request


@dataclass(slots=True, frozen=True)
class _OnHost:
    """Copies on the host, complete once `event` has passed; None: they are."""

    token_ids: Tensor
    best: Tensor
    failures: Mapping[int, str]
    event: torch.cuda.Event | None

    def tokens(self) -> Tokens:
        """Wait for the copies."""
        if self.event is not None:
            self.event.synchronize()
        return Tokens(self.token_ids.numpy(), self.best.numpy(), self.failures)


class TorchDevice:
    """An `engine.core.overlap.Device`."""

    def __init__(self, runner: PagedRunner) -> None:
        self._runner = runner
        self._side = _make_stream(runner.device) if runner.device.type == "cuda" else None

    @torch.inference_mode()
    def launch(self, batch: Batch, requests: Sequence[Request], copies: Sequence[tuple[int, int]]) -> _OnHost:
        """Start a step, as `engine.core.overlap.Device` says."""
        runner = self._runner
        if copies:
            runner.copy_blocks(copies)
        logits, _ = runner.launch(batch)
        if not requests:
            return self._fetch(DeviceSamples(runner.last_tokens[:0], logits.new_empty(0)))
        samples = sample_on_device(logits, requests)
        runner.last_tokens[: len(requests)].copy_(samples.token_ids)
        return self._fetch(samples)

    def _fetch(self, samples: DeviceSamples) -> _OnHost:
        """Begin to copy a step's results to the host."""
        tensors = samples.token_ids, samples.best
        if self._side is None:
            return _OnHost(*tensors, samples.failures, None)
        self._side.wait_stream(torch.cuda.current_stream(self._runner.device))
        with torch.cuda.stream(self._side):
            copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._side)  # else its memory could be the next step's before it is copied
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._side)
        return _OnHost(copies[0], copies[1], samples.failures, event)


def _make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
