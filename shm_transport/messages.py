"""Messages of the request ring (server to engine) and of the step ring's byte kinds, to and from bytes."""

import math
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringserve.shm_transport.errors import RecordError
from ringserve.shm_transport.layout import struct_of
from ringserve.shm_transport.records import ADD_FIELDS, DATA_FIELDS, DataContent, Pooling

_ADD = struct_of(ADD_FIELDS)
_DATA = struct_of(DATA_FIELDS)
_RESERVED = 0
_DTYPES = {b"i4": np.dtype("<i4"), b"f4": np.dtype("<f4")}
_POOLINGS = {int(pooling): pooling for pooling in Pooling}  # the enum's call takes ten times as long
_CONTENTS = {int(content): content for content in DataContent}
_MAX_DIMENSIONS = 8


class Fork(NamedTuple):
    """A further sequence of the same prompt and parameters, with a handle and draws of its own."""

    handle: int
    seed: int


@dataclass(slots=True, kw_only=True, frozen=True)
class AddRequest:
    """One request for the engine: prompt and sampling parameters, validated by the server.

    Token ids of the prompt are int32 [num_prompt_tokens]. `stop_token_ids` end the request like EOS does, but are
    reported. Neither they nor `eos_token_id` may be sampled before `min_tokens` tokens are there. `logit_bias` travels
    in single precision.
    """

    handle: int
    prompt_token_ids: NDArray[np.int32]
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on the tokens of prompt and output
    frequency_penalty: float = 0.0  # this and presence_penalty: on those of the output
    presence_penalty: float = 0.0
    seed: int = 0  # 64 bits; random draws depend on (seed, output index) alone
    eos_token_id: int = -1  # -1: ignore EOS
    stop_token_ids: tuple[int, ...] = field(default=())
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1  # -1: none; 0: the sampled token alone
    num_prompt_logprobs: int = -1  # -1: none; 0: the prompt's own tokens alone
    priority: int = 0  # lower runs earlier
    num_sibling_tokens: int = 0  # prompt tokens of the other prompts of its call
    key_number: int = 0  # of the client's API key, where keys share fairly; 0: all clients are one
    forks: tuple[Fork, ...] = ()
    cache_salt: str = ""
    adapter: str = ""
    grammar: str = ""  # what the output has to follow, as llguidance writes it
    pooling: Pooling = Pooling.NONE
    is_normalized: bool = False  # of the embedding that `pooling` makes

    def encode(self) -> bytes:
        """Return the body of an ADD record."""
        salt, adapter, grammar = self.cache_salt.encode(), self.adapter.encode(), self.grammar.encode()
        fields = _ADD.pack(
            self.handle, self.seed, self.temperature, self.top_p, self.min_p, self.repetition_penalty,
            self.frequency_penalty, self.presence_penalty, self.top_k, self.max_tokens, self.min_tokens,
            self.eos_token_id, self.num_logprobs, self.num_prompt_logprobs, self.priority, self.pooling,
            self.is_normalized, len(self.forks), len(self.prompt_token_ids), len(self.stop_token_ids),
            len(self.allowed_token_ids), len(self.bad_token_ids), len(self.logit_bias), len(salt), len(adapter),
            len(grammar), self.num_sibling_tokens, self.key_number, _RESERVED,
        )  # fmt: skip
        forks = [number for fork in self.forks for number in fork]
        biases = [number for bias in self.logit_bias for number in bias]
        prompt = np.ascontiguousarray(self.prompt_token_ids, "<i4").tobytes()
        ids = (*self.stop_token_ids, *self.allowed_token_ids, *self.bad_token_ids)
        return b"".join(
            (
                fields,
                struct.pack(f"<{len(forks)}Q", *forks),
                prompt,
                struct.pack(f"<{len(ids)}i", *ids),
                struct.pack("<" + "if" * len(self.logit_bias), *biases),
                salt,
                adapter,
                grammar,
            )
        )

    @classmethod
    def decode(cls, body: bytes) -> "AddRequest":
        """Read the body of an ADD record.

        Raises:
            RecordError: If the counts in the fields do not add up to the body's size, or a section cannot be read.
        """
        if len(body) < _ADD.size:
            raise RecordError(f"an ADD of {len(body)} bytes is shorter than its {_ADD.size} bytes of fields")
        (
            handle, seed, temperature, top_p, min_p, repetition, frequency, presence, top_k, max_tokens, min_tokens,
            eos, num_logprobs, num_prompt_logprobs, priority, pooling, is_normalized, num_forks, num_prompt, num_stop,
            num_allowed, num_bad, num_biases, salt_bytes, adapter_bytes, grammar_bytes,
            num_sibling_tokens, key_number, _,
        ) = _ADD.unpack_from(body)  # fmt: skip
        prompt_at = _ADD.size + 16 * num_forks
        ids_at = prompt_at + 4 * num_prompt
        salt_at = ids_at + 4 * (num_stop + num_allowed + num_bad) + 8 * num_biases
        adapter_at = salt_at + salt_bytes
        grammar_at = adapter_at + adapter_bytes
        if len(body) != grammar_at + grammar_bytes:
            raise RecordError(
                f"an ADD of {len(body)} bytes should be {grammar_at + grammar_bytes} bytes by its own counts"
            )
        if pooling not in _POOLINGS or is_normalized > 1:
            raise RecordError(f"an ADD has pooling {pooling} and is_normalized {is_normalized}: at most 2 and 1")
        sections = _Sections((), (), (), (), ())
        if ids_at < salt_at or num_forks:  # few requests have any
            sections = _read_sections(body, num_forks, ids_at, (num_stop, num_allowed, num_bad, num_biases))
        return cls(
            handle=handle, seed=seed, temperature=temperature, top_p=top_p, min_p=min_p, repetition_penalty=repetition,
            frequency_penalty=frequency, presence_penalty=presence, top_k=top_k, max_tokens=max_tokens,
            min_tokens=min_tokens, eos_token_id=eos, num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs, priority=priority, pooling=_POOLINGS[pooling],
            is_normalized=bool(is_normalized), num_sibling_tokens=num_sibling_tokens, key_number=key_number,
            forks=sections.forks,
            prompt_token_ids=np.frombuffer(body, "<i4", num_prompt, prompt_at), stop_token_ids=sections.stop_token_ids,
            allowed_token_ids=sections.allowed_token_ids, bad_token_ids=sections.bad_token_ids,
            logit_bias=sections.logit_bias, cache_salt=_text(body[salt_at:adapter_at]),
            adapter=_text(body[adapter_at:grammar_at]), grammar=_text(body[grammar_at:]),
        )  # fmt: skip


class _Sections(NamedTuple):
    forks: tuple[Fork, ...]
    stop_token_ids: tuple[int, ...]
    allowed_token_ids: tuple[int, ...]
    bad_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]


def _read_sections(body: bytes, num_forks: int, ids_at: int, counts: tuple[int, int, int, int]) -> _Sections:
    """Read the sections of tuples; the body is known to be long enough."""
    num_stop, num_allowed, num_bad, num_biases = counts
    bad_at = num_stop + num_allowed
    ids = struct.unpack_from(f"<{bad_at + num_bad}i", body, ids_at)
    biases = struct.unpack_from("<" + "if" * num_biases, body, ids_at + 4 * len(ids))
    forks = struct.unpack_from(f"<{2 * num_forks}Q", body, _ADD.size)
    return _Sections(
        forks=tuple(map(Fork, forks[::2], forks[1::2])),
        stop_token_ids=ids[:num_stop],
        allowed_token_ids=ids[num_stop:bad_at],
        bad_token_ids=ids[bad_at:],
        logit_bias=tuple(zip(biases[::2], biases[1::2], strict=True)),
    )


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise RecordError(f"{len(data)} bytes of a record's text are not UTF-8: {exc}") from exc


@dataclass(slots=True, kw_only=True, frozen=True)
class Data:
    """One array that a request asked for: part of its prompt logprobs, or its embedding."""

    handle: int
    content: DataContent
    array: NDArray[Any]  # int32 or float32

    def encode(self) -> bytes:
        """Return the body of a DATA record."""
        code = f"{self.array.dtype.kind}{self.array.dtype.itemsize}".encode()
        fields = _DATA.pack(self.handle, self.content, code, self.array.ndim)
        shape = np.array(self.array.shape, "<u8").tobytes()
        return b"".join((fields, shape, np.ascontiguousarray(self.array, _DTYPES[code]).tobytes()))

    @classmethod
    def decode(cls, body: bytes) -> "Data":
        """Read the body of a DATA record; the array is a view of `body`.

        Raises:
            RecordError: If a field has no meaning, or the shape does not give the body's size.
        """
        if len(body) < _DATA.size:
            raise RecordError(f"a DATA of {len(body)} bytes is shorter than its {_DATA.size} bytes of fields")
        handle, content, code, num_dimensions = _DATA.unpack_from(body)
        if code not in _DTYPES or content not in _CONTENTS or num_dimensions > _MAX_DIMENSIONS:
            raise RecordError(
                f"a DATA has content {content}, dtype {code!r} and {num_dimensions} dimensions: contents are "
                f"{list(_CONTENTS)}, dtypes i4 and f4, dimensions at most {_MAX_DIMENSIONS}"
            )
        array_at = _DATA.size + 8 * num_dimensions
        if len(body) < array_at:
            raise RecordError(f"a DATA of {len(body)} bytes is shorter than its {array_at} bytes of fields and shape")
        shape = struct.unpack_from(f"<{num_dimensions}Q", body, _DATA.size)
        expected = array_at + 4 * math.prod(shape)
        if len(body) != expected:
            raise RecordError(f"a DATA of {len(body)} bytes should be {expected} bytes by its own shape")
        try:
            array = np.frombuffer(body, _DTYPES[code], offset=array_at).reshape(shape)
        except (ValueError, OverflowError) as exc:  # nothing, times more than an index can hold
            raise RecordError(f"a DATA has the shape {shape}: {exc}") from exc
        return cls(handle=handle, content=_CONTENTS[content], array=array)
