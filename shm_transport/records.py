"""Every record kind's layout: plain numbers, no behaviour. The contract for any engine.

A segment is one SEGMENT_HEADER followed by `num_slots` slots of `slot_bytes`. A slot is one RECORD_HEADER followed by a
body. The body of a STEP record is structure-of-arrays: one column after the other, each aligned to a cache line
(layout.step_columns); the body of every other kind is bytes, ADD_FIELDS first for an ADD. All numbers: little-endian.
"""

import enum

import numpy as np

MAGIC = int.from_bytes(b"ringsrv\0", "little")
LAYOUT_VERSION = 1
CACHE_LINE_BYTES = 64
ENGINE_HANDLE = 2**64 - 1  # in an ERROR record: the engine itself failed, not one request
MAX_LOGPROBS = 20  # alternatives for each token; the sampled token itself comes on top

SEGMENT_HEADER = np.dtype(
    {
        "names": [
            "magic", "version", "ring", "num_slots", "slot_bytes", "segment_bytes", "epoch",
            "max_rows", "max_tokens", "max_logprob_entries",
            "alive_ns",
            "step_opened_ns", "step_closed_ns", "num_stalls", "stall_ns",
        ],
        "formats": [
            "<u8", "<u4", "<u4", "<u4", "<u4", "<u8", "<u8",
            "<u4", "<u4", "<u4",
            "<u8",
            "<u8", "<u8", "<u8", "<u8",
        ],
        # Line 0: the creator, once. Line 1: the engine's heartbeat thread. Line 2: the engine's loop.
        "offsets": [0, 8, 12, 16, 20, 24, 32, 40, 44, 48, 64, 128, 136, 144, 152],
        "itemsize": 4096,
    }
)  # fmt: skip

RECORD_HEADER = np.dtype(
    {
        "names": [
            "sequence", "kind", "flags", "body_bytes", "message_bytes",
            "num_rows", "num_tokens", "num_logprob_entries",
            "step", "scheduled_ns", "forward_done_ns", "published_ns",
            "num_running", "num_waiting", "num_blocks_used", "num_blocks", "num_preemptions",
        ],
        "formats": [
            "<u8", "<u2", "<u2", "<u4", "<u8",
            "<u4", "<u4", "<u4",
            "<u8", "<u8", "<u8", "<u8",
            "<u4", "<u4", "<u4", "<u4", "<u4",
        ],
        # Line 0: framing and counts, all kinds. Line 1: stamps and scheduler figures of a STEP.
        "offsets": [0, 8, 10, 12, 16, 24, 28, 32, 64, 72, 80, 88, 96, 100, 104, 108, 112],
        "itemsize": 128,
    }
)  # fmt: skip


class RingKind(enum.IntEnum):
    """Direction of a ring, in the segment header's `ring`."""

    STEP = 1  # engine -> server
    REQUEST = 2  # server -> engine


class RecordKind(enum.IntEnum):
    """What a record carries, in the record header's `kind`."""

    STEP = 1  # rows of new tokens
    ATTACHED = 2  # the engine has mapped both rings; nothing else in it
    READY = 3  # JSON: max_model_len, vocab_size, num_blocks
    REPLY = 4  # u64 call id, then JSON
    ERROR = 5  # u64 handle, then UTF-8 text: this one request failed
    DATA = 6  # u64 handle, then dtype, shape and bytes of one array
    ADD = 16  # ADD_FIELDS, then i32 prompt token ids, then i32 stop token ids, then a tail of bytes
    ABORT = 17  # u64 handles
    CALL = 18  # u64 call id, then JSON


class RecordFlag(enum.IntFlag):
    """Bits of the record header's `flags`; the reader touches only the columns that they name."""

    MORE = 1  # the message, or the step, goes on in the next record
    ANY_FINISHED = 2  # finish_reason and stop_token_id matter
    ANY_MULTI_TOKEN = 4  # some row does not have exactly one token: token_offset and num_tokens matter
    ANY_FIRST = 8  # some row is its request's first: stamps, cached tokens and preemptions matter
    ANY_LOGPROBS = 16  # the logprob sections matter


class FinishReason(enum.IntEnum):
    """Why a row is its request's last one; 0 means that it goes on."""

    NONE = 0
    STOP = 1  # EOS (stop_token_id -1) or one of the request's stop_token_ids
    LENGTH = 2
    ABORT = 3
    ERROR = 4


STEP_ROW_COLUMNS = (
    ("handle", "<u8"),  # slot index (low 32 bits) and generation (high 32 bits), chosen by the server
    ("token_offset", "<u4"),  # first of the row's tokens in token_id
    ("num_tokens", "<u4"),
    ("finish_reason", "u1"),
    ("stop_token_id", "<i4"),  # -1: none, or EOS
    ("num_cached_tokens", "<u4"),  # prompt tokens that came from the prefix cache
    ("queued_ns", "<u8"),  # CLOCK_MONOTONIC
    ("first_scheduled_ns", "<u8"),
    ("num_preemptions", "<u4"),
    ("num_logprobs", "u1"),  # entries for each of the row's tokens, the sampled one first; 0: none
)
STEP_TOKEN_COLUMNS = (
    ("token_id", "<i4"),
    ("sampled_rank", "<i4"),  # 1 for the most likely token; only where ANY_LOGPROBS
)
STEP_LOGPROB_COLUMNS = (
    ("logprob_token_id", "<i4"),  # row by row, token by token, num_logprobs entries each
    ("logprob", "<f4"),  # natural logarithm, of the raw logits
)

ADD_FIELDS = np.dtype(
    [
        ("handle", "<u8"),
        ("seed", "<u8"),
        ("temperature", "<f8"),  # below 1e-5: greedy
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("top_k", "<i4"),  # 0: off
        ("max_tokens", "<u4"),
        ("min_tokens", "<u4"),
        ("eos_token_id", "<i4"),  # -1: no token ends the request as EOS
        ("num_logprobs", "<i4"),  # -1: none; 0: the sampled token alone
        ("num_prompt_tokens", "<u4"),
        ("num_stop_token_ids", "<u4"),
        ("tail_bytes", "<u4"),
    ]
)
