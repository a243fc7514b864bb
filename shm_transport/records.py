"""Every record kind's layout: plain numbers, no behaviour. The contract for any engine.

A segment is one SEGMENT_HEADER followed by `num_slots` slots of `slot_bytes`. A slot is one RECORD_HEADER followed by a
body. The body of a STEP record is structure-of-arrays: one column after the other, each aligned to a cache line
(layout.step_columns); the body of every other kind is bytes, ADD_FIELDS first for an ADD. All numbers: little-endian.
"""

import enum

import numpy as np

MAGIC = int.from_bytes(b"ringsrv\0", "little")
LAYOUT_VERSION = 4
CACHE_LINE_BYTES = 64
ENGINE_HANDLE = 2**64 - 1  # in an ERROR record: the engine itself failed, not one request
GRAMMAR_END = -2  # a stop_token_id: the grammar admits nothing after the row's last token, which is text
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
            "num_rows", "num_tokens", "num_logprob_entries", "num_prefill_tokens",
            "step", "scheduled_ns", "forward_done_ns", "published_ns",
            "num_running", "num_waiting", "num_blocks_used", "num_blocks", "num_preemptions",
            "num_aborted", "aborted_ns",
        ],
        "formats": [
            "<u8", "<u2", "<u2", "<u4", "<u8",
            "<u4", "<u4", "<u4", "<u4",
            "<u8", "<u8", "<u8", "<u8",
            "<u4", "<u4", "<u4", "<u4", "<u4",
            "<u4", "<u8",
        ],
        # Line 0: framing and counts, all kinds. Line 1: stamps and scheduler figures of a STEP.
        "offsets": [0, 8, 10, 12, 16, 24, 28, 32, 36, 64, 72, 80, 88, 96, 100, 104, 108, 112, 116, 120],
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
    READY = 3  # JSON: max_model_len, vocab_size, embedding_size, num_blocks
    REPLY = 4  # u64 call id, then JSON
    ERROR = 5  # u64 handle, then UTF-8 text: this one request failed
    DATA = 6  # DATA_FIELDS, then the shape, then the bytes of one array
    REFUSAL = 7  # like ERROR, where it is the request that asks for what cannot be had
    ADD = 16  # ADD_FIELDS, then its counted sections
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
    STOP = 1  # EOS (stop_token_id -1), a token of stop_token_ids, or the end of the grammar (GRAMMAR_END)
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class DataContent(enum.IntEnum):
    """What a DATA record's array is. Prompt arrays have a row for each prompt token but the first."""

    PROMPT_TOKEN_IDS = 1  # i4 [num_prompt_tokens - 1, 1 + k]: the prompt's own token, then the k most likely ones
    PROMPT_LOGPROBS = 2  # f4, like PROMPT_TOKEN_IDS: their natural logarithms, of the raw logits
    PROMPT_RANKS = 3  # i4 [num_prompt_tokens - 1], of the prompt's own token; 1: the most likely
    EMBEDDING = 4  # f4 [hidden_size]; the request's last record, no STEP row follows


class Pooling(enum.IntEnum):
    """How an ADD's final hidden states become one embedding; NONE: it wants tokens instead."""

    NONE = 0
    LAST = 1  # the last prompt token's
    MEAN = 2  # the mean of all prompt tokens'


STEP_ROW_COLUMNS = (
    ("handle", "<u8"),  # slot index (low 32 bits) and generation (high 32 bits), chosen by the server
    ("token_offset", "<u4"),  # first of the row's tokens in token_id
    ("num_tokens", "<u4"),
    ("finish_reason", "u1"),
    ("stop_token_id", "<i4"),  # -1: none, or EOS; or GRAMMAR_END
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

# After them, in this order, each with as many items as its count says, without padding: forks, prompt token ids, stop,
# allowed and bad token ids, logit biases, cache salt, adapter, grammar. 8-byte items come first, so all are aligned.
ADD_FIELDS = np.dtype(
    [
        ("handle", "<u8"),
        ("seed", "<u8"),
        ("temperature", "<f8"),  # below 1e-5: greedy
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("repetition_penalty", "<f8"),  # 1: off; on the tokens of prompt and output
        ("frequency_penalty", "<f8"),  # 0: off; for each time that a token is in the output
        ("presence_penalty", "<f8"),  # 0: off; once for each token that is in the output
        ("top_k", "<i4"),  # 0: off
        ("max_tokens", "<u4"),
        ("min_tokens", "<u4"),
        ("eos_token_id", "<i4"),  # -1: no token ends the request as EOS
        ("num_logprobs", "<i4"),  # -1: none; 0: the sampled token alone
        ("num_prompt_logprobs", "<i4"),  # -1: none; 0: the prompt's own tokens alone; comes as DATA
        ("priority", "<i4"),  # lower runs earlier
        ("pooling", "<u2"),  # Pooling
        ("is_normalized", "<u2"),  # 1: the embedding is scaled to length 1
        ("num_forks", "<u4"),  # u8 handle and u8 seed each: further sequences of this prompt (n > 1)
        ("num_prompt_tokens", "<u4"),  # i4 each
        ("num_stop_token_ids", "<u4"),  # i4 each
        ("num_allowed_token_ids", "<u4"),  # i4 each; none: every token may be sampled
        ("num_bad_token_ids", "<u4"),  # i4 each; never sampled
        ("num_logit_biases", "<u4"),  # i4 token id and f4 bias each, added to the logit
        ("cache_salt_bytes", "<u4"),  # UTF-8; prompts of different salts share no cached block
        ("adapter_bytes", "<u4"),  # UTF-8; name of a LoRA adapter, empty: the model as it is
        ("grammar_bytes", "<u4"),  # UTF-8; an llguidance grammar that the output has to follow, empty: none
        ("num_sibling_tokens", "<u4"),  # prompt tokens of the other prompts of the same call
        ("key_number", "<u4"),  # of the client's API key, where keys share fairly; 0: all clients are one
        ("reserved", "<u4"),  # 0; keeps the sections aligned
    ]
)

# After them the shape, u8 [num_dimensions], then the array's bytes in C order.
DATA_FIELDS = np.dtype(
    [
        ("handle", "<u8"),
        ("content", "<u2"),  # DataContent
        ("dtype", "S2"),  # little-endian; i4 or f4
        ("num_dimensions", "<u4"),
    ]
)
