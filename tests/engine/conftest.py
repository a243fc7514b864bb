"""Tiny random models, and a driver that collects what an engine emits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from engine.batch import Batch
from engine.config import EngineConfig
from engine.core import EngineCore
from shm_transport.messages import AddRequest
from shm_transport.records import FinishReason
from shm_transport.step import Step

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
    "bloom": lambda: BloomConfig(**_COMMON, hidden_size=32, n_layer=2, n_head=4),
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

    core: EngineCore
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, tuple[FinishReason, int]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, handle: int, prompt: Sequence[int], **params: Any) -> None:
        """Add a request; greedy unless `params` say otherwise."""
        settings = {"temperature": 0.0, "max_tokens": 16, **params}
        self.core.add(AddRequest(handle=handle, prompt_token_ids=np.array(prompt, np.int32), **settings))

    def step(self) -> Step:
        """Run one step and sort its rows."""
        step = self.core.step()
        for row, (handle, token_id) in enumerate(zip(step.handles.tolist(), step.token_ids.tolist(), strict=True)):
            assert handle not in self.finishes
            self.tokens.setdefault(handle, []).append(token_id)
            if step.finish_reasons is not None and step.finish_reasons[row]:
                assert step.stop_token_ids is not None
                self.finishes[handle] = (FinishReason(step.finish_reasons[row]), int(step.stop_token_ids[row]))
        self.failures.update({failure.handle: str(failure) for failure in self.core.take_failures()})
        return step

    def run(self) -> None:
        """Step until there is nothing left to do."""
        while self.core.has_work:
            self.step()

    def is_idle_and_empty(self) -> bool:
        """Whether nothing is held any more."""
        figures = self.core.idle_step()
        held = (figures.num_running, figures.num_waiting, figures.num_blocks_used)
        return not self.core.has_work and held == (0, 0, 0)


class FakeRunner:
    """A runner without a model: a row's logits are made from its last token and position, by `logits_of`."""

    def __init__(self, logits_of: Callable[[int, int], np.ndarray[Any, Any]], *, num_slots: int = 1024) -> None:
        self.max_model_len = 64
        self.vocab_size = len(logits_of(0, 0))
        self.num_slots = num_slots
        self.batches: list[Batch] = []
        self.raises: Exception | None = None
        self._logits_of = logits_of

    def forward(self, batch: Batch) -> torch.Tensor:
        """Note the batch; make the logits, or raise what the test put into `raises`."""
        if self.raises is not None:
            raise self.raises
        self.batches.append(batch)
        pairs = zip(batch.token_ids[batch.last_rows], batch.positions[batch.last_rows], strict=True)
        rows = [self._logits_of(int(token_id), int(position)) for token_id, position in pairs]
        return torch.from_numpy(np.stack(rows).astype(np.float32))


def successor_logits(token_id: int, position: int) -> np.ndarray[Any, Any]:
    """Make the next id the most likely token, of a vocabulary of 32."""
    return -np.abs(np.arange(32.0) - (token_id + 1) % 32)


@pytest.fixture
def fake_runner() -> FakeRunner:
    """A runner that counts: after token n comes n + 1."""
    return FakeRunner(successor_logits)


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    """Build a driver over an engine with a fake runner, or with a real one if none is given."""

    def make(config: EngineConfig | None = None, runner: FakeRunner | None = None) -> Driver:
        return Driver(EngineCore(config or EngineConfig(model="none", max_num_seqs=4), runner=runner))

    return make
