"""What the engine's steps have cost, by phase."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepCosts:
    """Nanoseconds since the engine started, summed over its steps; written by the loop's thread alone."""

    num_steps: int = 0
    schedule_ns: int = 0
    pack_ns: int = 0  # the plan as arrays
    forward_ns: int = 0
    sample_ns: int = 0
    commit_ns: int = 0  # tokens and ends noted, columns put together
    publish_ns: int = 0
    settle_ns: int = 0  # after publication

    @property
    def bookkeeping_ns(self) -> int:
        """What the requests wait for besides the model and the sampler."""
        return self.schedule_ns + self.pack_ns + self.commit_ns + self.publish_ns
