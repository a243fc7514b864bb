"""What the front end must know of the model, from the JSON files of its directory."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringserve.server.chat.template import ChatTemplate, load_chat_template
from ringserve.server.errors import RequestError, StartupError, shown
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.text.tokenizer import Tokenizer, read_json
from ringserve.shm_transport.records import Pooling

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The model as the front end sees it. The limits come from the engine, once it is ready (`with_limits`)."""

    directory_name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_id: int  # -1: none
    extra_eos_token_ids: tuple[int, ...]  # end a request like stop_token_ids, unless ignore_eos
    max_model_len: int = 0
    vocab_size: int = 0  # of the model: ids from the tokenizer's size to this are legal, and no text
    embedding_size: int = 0  # numbers in an embedding
    pooling: Pooling = Pooling.LAST  # of embeddings, where a request names none
    sampling_defaults: dict[str, float] = field(default_factory=dict)  # from generation_config.json

    @classmethod
    def load(cls, tokenizer_json: Path, *, chat_template: str | None) -> "ModelInfo":
        """Read a tokenizer.json and the files beside it.

        Raises:
            StartupError: If a file is missing or broken.
        """
        directory = tokenizer_json.parent
        tokenizer = Tokenizer.load(tokenizer_json)
        generation = read_json(directory / "generation_config.json")
        named = _token_ids(generation, directory) or _token_ids(read_json(directory / "config.json"), directory)
        eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(named), -1)
        return cls(
            directory_name=directory.name,
            tokenizer=tokenizer,
            chat_template=load_chat_template(directory, chat_template, tokenizer.special_tokens),
            eos_token_id=eos,
            extra_eos_token_ids=tuple(token_id for token_id in named if token_id != eos),
            sampling_defaults=_sampling_defaults(generation, directory),
            pooling=_pooling(directory),
        )

    def with_limits(self, *, max_model_len: int, vocab_size: int, embedding_size: int = 0) -> "ModelInfo":
        """Return the same with the limits that the engine reported."""
        return replace(
            self, max_model_len=max_model_len, vocab_size=max(vocab_size, self.tokenizer.vocab_size),
            embedding_size=embedding_size,
        )  # fmt: skip


def _token_ids(config: dict[str, Any], directory: Path) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise StartupError(
            f"eos_token_id is {shown(value)} in the configuration of {directory}: must be a token id or a list of them"
        )
    return ids


def _pooling(directory: Path) -> Pooling:
    """Return what the model was trained for, as sentence-transformers notes it; the last token's if nothing is."""
    is_mean = read_json(directory / "1_Pooling" / "config.json").get("pooling_mode_mean_tokens") is True
    return Pooling.MEAN if is_mean else Pooling.LAST


def _sampling_defaults(generation: dict[str, Any], directory: Path) -> dict[str, float]:
    defaults = {name: generation[name] for name in _SAMPLING_DEFAULTS if generation.get(name) is not None}
    wrong = {k: v for k, v in defaults.items() if type(v) not in ((int,) if k == "top_k" else (int, float))}
    try:
        SamplingParams(**(defaults if not wrong else {}))
    except RequestError as exc:
        raise StartupError(f"{directory / 'generation_config.json'}: {exc}") from exc
    if wrong:
        raise StartupError(f"{directory / 'generation_config.json'}: {shown(wrong)} must be numbers, top_k an integer")
    return defaults
