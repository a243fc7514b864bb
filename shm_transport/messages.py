"""Messages of the request ring (server to engine) and of the step ring's byte kinds, to and from bytes."""

import struct
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shm_transport.errors import RecordError
from shm_transport.records import ADD_FIELDS

_ADD = struct.Struct("<QQdddiIIiiIII")
assert _ADD.size == ADD_FIELDS.itemsize


@dataclass(slots=True, kw_only=True, frozen=True)
class AddRequest:
    """One request for the engine: prompt and sampling parameters, validated by the server.

    Token ids of the prompt are int32 [num_prompt_tokens]. `stop_token_ids` end the request like EOS does, but are
    reported. Neither they nor `eos_token_id` may be sampled before `min_tokens` tokens are there.
    """

    handle: int
    prompt_token_ids: NDArray[np.int32]
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # 64 bits; random draws depend on (seed, output index) alone
    eos_token_id: int = -1  # -1: ignore EOS
    stop_token_ids: tuple[int, ...] = field(default=())
    num_logprobs: int = -1  # -1: none; 0: the sampled token alone
    tail: bytes = b""  # reserved: adapters, cache salts

    def encode(self) -> bytes:
        """Return the body of an ADD record."""
        fields = _ADD.pack(
            self.handle, self.seed, self.temperature, self.top_p, self.min_p, self.top_k, self.max_tokens,
            self.min_tokens, self.eos_token_id, self.num_logprobs, len(self.prompt_token_ids),
            len(self.stop_token_ids), len(self.tail),
        )  # fmt: skip
        prompt = np.ascontiguousarray(self.prompt_token_ids, "<i4").tobytes()
        return b"".join((fields, prompt, np.array(self.stop_token_ids, "<i4").tobytes(), self.tail))

    @classmethod
    def decode(cls, body: bytes) -> "AddRequest":
        """Read the body of an ADD record.

        Raises:
            RecordError: If the counts in the fields do not add up to the body's size.
        """
        if len(body) < _ADD.size:
            raise RecordError(f"an ADD of {len(body)} bytes is shorter than its {_ADD.size} bytes of fields")
        handle, seed, temperature, top_p, min_p, top_k, max_tokens, min_tokens, eos, num_logprobs, *counts = (
            _ADD.unpack_from(body)
        )
        num_prompt, num_stop, tail_bytes = counts
        expected = _ADD.size + 4 * (num_prompt + num_stop) + tail_bytes
        if len(body) != expected:
            raise RecordError(f"an ADD of {len(body)} bytes should be {expected} bytes by its own counts")
        stop_at = _ADD.size + 4 * num_prompt
        return cls(
            handle=handle, seed=seed, temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k,
            max_tokens=max_tokens, min_tokens=min_tokens, eos_token_id=eos, num_logprobs=num_logprobs,
            prompt_token_ids=np.frombuffer(body, "<i4", num_prompt, _ADD.size),
            stop_token_ids=tuple(np.frombuffer(body, "<i4", num_stop, stop_at).tolist()),
            tail=body[stop_at + 4 * num_stop :],
        )  # fmt: skip
