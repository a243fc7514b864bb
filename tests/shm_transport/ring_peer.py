"""The engine's side of the two-process tests: attach, publish records with checksums, or stop at a named point."""

import json
import os
import signal
import sys
import zlib

import numpy as np

from ringserve.shm_transport import process, segment
from ringserve.shm_transport.errors import PeerDiedError
from ringserve.shm_transport.records import RecordKind, RingKind
from ringserve.shm_transport.step import Step
from ringserve.shm_transport.step_ring import StepWriter


class CheckedSteps:
    """A stock of steps of random sizes, so that a million records take seconds."""

    def __init__(self, seed: int, num_kept: int = 1024) -> None:
        rng = np.random.default_rng(seed)
        self._steps = [checked_step(0, rng) for _ in range(num_kept)]
        self._order = rng.permutation(num_kept * 7) % num_kept

    def step(self, n: int) -> Step:
        step = self._steps[self._order[n % len(self._order)]]
        step.handles[1:] = n
        step.num_running = n % 1000
        return step


def checked_step(n: int, rng: np.random.Generator) -> Step:
    """A step of random size whose first row carries the CRC of all its tokens as its handle."""
    counts = rng.integers(1, 4, int(rng.integers(1, 9))).astype(np.uint32)
    tokens = rng.integers(0, 2**31 - 1, int(counts.sum())).astype(np.int32)
    handles = np.full(len(counts), n, np.uint64)
    handles[0] = zlib.crc32(tokens.tobytes())
    return Step(handles=handles, token_ids=tokens, num_tokens=counts, num_running=n % 1000)


def main() -> None:
    config = json.loads(sys.argv[1])
    parent = os.getppid()

    def on_full() -> None:
        if os.getppid() != parent:
            raise PeerDiedError("the consumer died")

    process.die_with_parent(config["parent"])
    ring = segment.attach(config["name"], RingKind.STEP, config["epoch"])
    writer = StepWriter(ring, on_full)
    writer.publish_message(RecordKind.ATTACHED)
    steps = CheckedSteps(config["seed"])
    for n in range(config["num_records"]):
        writer.publish(steps.step(n))
    if config.get("kill_self"):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
