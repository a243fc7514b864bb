"""Sizes of the rings, and where their names come from."""

from dataclasses import dataclass

from ringserve.shm_transport.errors import RecordTooLargeError
from ringserve.shm_transport.layout import step_columns
from ringserve.shm_transport.records import CACHE_LINE_BYTES, MAX_LOGPROBS, RECORD_HEADER, SEGMENT_HEADER


@dataclass(frozen=True, kw_only=True, slots=True)
class RingConfig:
    """Geometry of both rings; the defaults take 7 MB, a ninth of the 64 MB /dev/shm that Docker gives."""

    num_step_slots: int = 32  # steps the server may fall behind before the engine waits
    max_rows: int = 1024  # rows of one STEP record; a larger step takes several records
    max_tokens: int = 4096  # tokens of one STEP record
    max_logprob_entries: int = 8192  # 390 tokens with 20 alternatives each
    num_request_slots: int = 512  # read between two steps: with 16 a chat waited 16 steps behind a call of 256 prompts
    request_slot_bytes: int = 4096  # a prompt of 900 tokens; a longer one takes several records

    def __post_init__(self) -> None:
        """Raise RecordTooLargeError for sizes that no record could use."""
        for name in ("num_step_slots", "max_rows", "max_tokens", "num_request_slots"):
            if getattr(self, name) < 1:
                raise RecordTooLargeError(f"RingConfig.{name} is {getattr(self, name)}: at least 1")
        if self.max_logprob_entries < MAX_LOGPROBS + 1:
            raise RecordTooLargeError(
                f"RingConfig.max_logprob_entries is {self.max_logprob_entries}: one token needs {MAX_LOGPROBS + 1}"
            )
        smallest = RECORD_HEADER.itemsize + CACHE_LINE_BYTES
        if self.request_slot_bytes < smallest or self.request_slot_bytes % CACHE_LINE_BYTES:
            raise RecordTooLargeError(
                f"RingConfig.request_slot_bytes is {self.request_slot_bytes}: "
                f"a multiple of {CACHE_LINE_BYTES}, at least {smallest}"
            )

    @property
    def step_slot_bytes(self) -> int:
        """Size of one slot of the step ring."""
        return step_columns(self.max_rows, self.max_tokens, self.max_logprob_entries)[1]

    @property
    def total_bytes(self) -> int:
        """Shared memory that both rings take together."""
        slots = self.num_step_slots * self.step_slot_bytes + self.num_request_slots * self.request_slot_bytes
        return 2 * SEGMENT_HEADER.itemsize + slots
