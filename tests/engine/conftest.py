"""Tiny random models, and a driver that collects what an engine emits."""

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    JetMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from ringserve.engine.config import EngineConfig
from ringserve.engine.core.core import EngineCore
from ringserve.engine.core.make import make_engine
from ringserve.engine.core.overlap import OverlappingCore
from ringserve.engine.schedule.batch import Batch
from ringserve.engine.weights.adapters import Adapters
from ringserve.shm_transport.messages import AddRequest, Data
from ringserve.shm_transport.records import FinishReason
from ringserve.shm_transport.step import Step

VOCAB_SIZE = 300
CONTEXT = 96
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.4,  # far from the usual 0.02, so that outputs vary and depend on the context
}
_LLAMA_LIKE = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}
_PLAIN_HEADS = {key: value for key, value in _LLAMA_LIKE.items() if key not in ("num_key_value_heads", "head_dim")}
_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_LLAMA_LIKE),
    "qwen2": lambda: Qwen2Config(**{key: value for key, value in _LLAMA_LIKE.items() if key != "head_dim"}),
    "gpt2": lambda: GPT2Config(**_COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT),
    # softcap and a window that is shorter than most prompts
    "gemma2": lambda: Gemma2Config(**_LLAMA_LIKE, sliding_window=8, query_pre_attn_scalar=8, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**_LLAMA_LIKE, sliding_window=8),
    # attention sinks
    "gpt_oss": lambda: GptOssConfig(
        **_LLAMA_LIKE,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "qwen3": lambda: Qwen3Config(**_LLAMA_LIKE, tie_word_embeddings=True),
    # one layer without rotary embedding, one with a window
    "smollm3": lambda: SmolLM3Config(
        **_LLAMA_LIKE,
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_LLAMA_LIKE,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
        tie_word_embeddings=False,
    ),
    "phi3": lambda: Phi3Config(**{key: value for key, value in _LLAMA_LIKE.items() if key != "head_dim"}),
    "gpt_neox": lambda: GPTNeoXConfig(**_PLAIN_HEADS, rotary_pct=0.5),
    "opt": lambda: OPTConfig(
        **_COMMON | {"pad_token_id": 1},
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=32,
    ),
    "mixtral": lambda: MixtralConfig(**_LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2),
    "granite": lambda: GraniteConfig(
        **{key: value for key, value in _LLAMA_LIKE.items() if key != "head_dim"},
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    # calls the attention with its mask by name
    "afmoe": lambda: AfmoeConfig(
        **_LLAMA_LIKE,
        sliding_window=8,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    # takes a view of what the attention returns
    "jetmoe": lambda: JetMoeConfig(
        **_COMMON,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    # has a linear layer behind its blocks, which sees the wanted rows alone
    "modernbert-decoder": lambda: ModernBertDecoderConfig(
        **_PLAIN_HEADS | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0), local_attention=16
    ),
    # its window stands in the masks alone
    "phimoe": lambda: PhimoeConfig(**_LLAMA_LIKE, sliding_window=40, num_local_experts=4, num_experts_per_tok=2),
    # makes masks of its own
    "doge": lambda: DogeConfig(**_LLAMA_LIKE),
    # Their attention does not go through transformers' interface.
    "bloom": lambda: BloomConfig(**_COMMON, hidden_size=32, n_layer=2, n_head=4),
    "gpt_neo": lambda: GPTNeoConfig(
        **_COMMON,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global"], 2]],
        max_position_embeddings=CONTEXT,
    ),
    "bert": lambda: BertConfig(
        **_COMMON | {"pad_token_id": 0},
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
}


@dataclass
class TinyModel:
    """A saved model and transformers' own copy of it, the oracle."""

    path: str
    model: Any

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return what transformers' generate() says, greedily."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def config(self, **settings: Any) -> EngineConfig:
        """Return a configuration that serves it."""
        return EngineConfig(**{"model": self.path, "device": "cpu", "num_threads": 1, "max_num_seqs": 8, **settings})


@pytest.fixture(scope="session", autouse=True)
def _own_check_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tiny models' reference logits out of the user's cache."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringserve.engine.runner.check_cache.default_cache_root", lambda: root)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Make, once a session, the tiny model of an architecture."""
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            torch.manual_seed(len(name))
            path: Path = tmp_path_factory.mktemp(name)
            model = AutoModelForCausalLM.from_config(_CONFIGS[name]()).eval()
            model.save_pretrained(path)
            made[name] = TinyModel(str(path), model)
        return made[name]

    return make


@dataclass
class Driver:
    """Steps an engine and keeps everything that it emitted, by handle."""

    core: EngineCore | OverlappingCore
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, tuple[FinishReason, int]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)  # which of those are no fault of the engine's
    data: list[Data] = field(default_factory=list)

    def add(self, handle: int, prompt: Sequence[int], **params: Any) -> None:
        """Add a request; greedy unless `params` say otherwise."""
        settings = {"temperature": 0.0, "max_tokens": 16, **params}
        self.core.add(AddRequest(handle=handle, prompt_token_ids=np.array(prompt, np.int32), **settings))

    def step(self) -> Step:
        """Run one step and sort its rows."""
        step = self.core.step() or self.core.idle_step()
        self.data += self.core.take_data()
        for row, (handle, token_id) in enumerate(zip(step.handles.tolist(), step.token_ids.tolist(), strict=True)):
            assert handle not in self.finishes
            self.tokens.setdefault(handle, []).append(token_id)
            if step.finish_reasons is not None and step.finish_reasons[row]:
                assert step.stop_token_ids is not None
                self.finishes[handle] = (FinishReason(step.finish_reasons[row]), int(step.stop_token_ids[row]))
        for failure in self.core.take_failures():
            assert failure.handle not in self.finishes
            assert failure.handle not in self.failures
            self.failures[failure.handle] = str(failure)
            self.refused |= {failure.handle} if failure.is_refusal else set()
        self.core.after_step()
        return step

    def run(self) -> None:
        """Step until there is nothing left to do."""
        while self.core.has_work:
            self.step()

    def is_idle_and_empty(self) -> bool:
        """Whether nothing is held any more."""
        figures = self.core.idle_step()
        core = self.core._core if isinstance(self.core, OverlappingCore) else self.core
        held = (figures.num_running, figures.num_waiting, core._pool.num_used)
        return not self.core.has_work and held == (0, 0, 0)


class FakeRunner:
    """A runner without a model, whose cache holds token ids: logits are made from what a row finds in its own blocks.

    So a block that is shared, copied, freed or found wrongly shows in the tokens. `logits_of` is given all tokens up to
    the row's own.
    """

    def __init__(
        self,
        logits_of: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
        *,
        num_blocks: int = 257,
        block_size: int = 4,
        max_model_len: int = 64,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = len(logits_of(np.zeros(1, np.int64)))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.adapters = Adapters({}, None, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        self.hidden_size = 0  # it embeds nothing
        self.raises: Exception | None = None
        self._logits_of = logits_of
        self._cache = np.full((num_blocks, block_size), -1, np.int64)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Make the logits, or raise what the test put into `raises`."""
        if self.raises is not None:
            raise self.raises
        assert len(np.unique(batch.slot_mapping)) == len(batch.slot_mapping)
        assert (batch.slot_mapping >= self.block_size).all()  # not the padding block
        self._cache.reshape(-1)[batch.slot_mapping] = batch.token_ids
        rows = [self._logits_of(self._context(batch, row)) for row in batch.last_rows.tolist()]
        return torch.from_numpy(np.array(rows, np.float32).reshape(len(rows), self.vocab_size))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks."""
        sources, destinations = zip(*pairs, strict=True)
        assert not set(sources) & set(destinations)
        self._cache[list(destinations)] = self._cache[list(sources)]

    def _context(self, batch: Batch, row: int) -> np.ndarray[Any, Any]:
        if row < batch.num_decodes:
            table, length = batch.block_tables[row], int(batch.decode_lengths[row])
        else:
            chunk = next(chunk for chunk in batch.chunks if chunk.start <= row < chunk.end)
            table, length = chunk.block_table, chunk.num_context + row - chunk.start + 1
        tokens = self._cache[table[: -(-length // self.block_size)]].reshape(-1)[:length]
        assert length == batch.positions[row] + 1
        assert tokens[-1] == batch.token_ids[row]
        assert (tokens >= 0).all()
        return tokens


def successor_logits(context: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Make the next id the most likely token, of a vocabulary of 32."""
    return -np.abs(np.arange(32.0) - (context[-1] + 1) % 32)


_RANDOM_LOGITS = np.random.default_rng(0).normal(0.0, 3.0, (251, 32))


def hashed_logits(context: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Make logits that depend on every token of the context, for a vocabulary of 32."""
    return _RANDOM_LOGITS[zlib.crc32(context.astype("<i4").tobytes()) % len(_RANDOM_LOGITS)]


@pytest.fixture
def fake_runner() -> FakeRunner:
    """A runner that counts: after token n comes n + 1."""
    return FakeRunner(successor_logits)


@pytest.fixture
def make_hashing_runner() -> Callable[..., FakeRunner]:
    """Build a runner whose tokens depend on the whole context; settings as FakeRunner's."""
    return functools.partial(FakeRunner, hashed_logits)


@pytest.fixture
def hashed_tokens() -> Callable[[Sequence[int], int], list[int]]:
    """What a greedy request gets from such a runner: (prompt, max_tokens) -> token ids."""

    def tokens(prompt: Sequence[int], max_tokens: int) -> list[int]:
        context = np.array(prompt, np.int64)
        for _ in range(max_tokens):
            context = np.append(context, hashed_logits(context).argmax())
        return context[len(prompt) :].tolist()  # type: ignore[no-any-return]

    return tokens


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    """Build a driver over an engine with a fake runner, or with a real one if none is given."""

    def make(config: EngineConfig | None = None, runner: FakeRunner | None = None) -> Driver:
        config = config or EngineConfig(model="none", max_num_seqs=4)
        return Driver(make_engine(config) if runner is None else EngineCore(config, runner=runner))

    return make
