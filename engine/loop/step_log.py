"""A log of when each step was published, for benchmarks that compare it with a client's clock."""

from pathlib import Path

from ringserve.shm_transport.step import Step


class StepLog:
    """One line a step: published_ns (CLOCK_MONOTONIC), rows, tokens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, published_ns: int, step: Step) -> None:
        """Append one step."""
        self._file.write(f"{published_ns} {len(step.handles)} {len(step.token_ids)}\n")
