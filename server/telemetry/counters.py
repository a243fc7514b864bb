"""What a ring has carried, and how its reader waited: one immutable snapshot, taken when somebody asks."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, frozen=True)
class RingCounters:
    """Counts since the step ring was created."""

    num_records: int  # STEP records read
    num_tokens: int  # in them
    num_coalesced_records: int  # read while others waited behind them: their deltas merged
    num_late_rows: int  # of requests that had ended here already, dropped
    num_stalls: int  # times that the engine found the ring full
    stall_s: float  # how long it waited then
    num_wakes: int  # records that the waiter thread waited for
    num_spins_hit: int  # records that came while the loop was spinning
    num_spins_missed: int  # windows in which none came
