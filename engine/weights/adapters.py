"""LoRA adapters: PEFT directories, and the linear layers that apply them to a mixed batch.

An adapter adds scale * (x @ A.T) @ B.T to what a linear layer makes of a row x. A batch's rows are grouped by adapter,
so that requests with different adapters, or none, share each step; a step in which nobody has one pays nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ringserve.engine.errors import AdapterError
from ringserve.engine.weights.linear import Linear, LinearFactory

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
# What a PEFT config can ask for beside plain LoRA: refused by name, because leaving it out would change the tokens.
_UNSUPPORTED = (
    "use_dora", "modules_to_save", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication",
    "trainable_token_indices", "target_parameters", "use_qalora", "use_bdlora", "alora_invocation_tokens",
)  # fmt: skip
_HARMLESS_CONFIGS = ("megatron_config",)  # all others ask for a variant of LoRA
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")  # ways to initialise that alter the base model's weights too


@dataclass(slots=True, frozen=True)
class LowRank:
    """An adapter's part in one linear layer."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank], scaled


@dataclass(slots=True, frozen=True)
class Adapter:
    """A loaded adapter."""

    name: str
    parts: Mapping[str, LowRank]  # by the linear layer's name in the model, such as model.layers.0.mlp.up_proj


def load_adapter(name: str, path: str) -> Adapter:
    """Read a PEFT directory.

    Raises:
        AdapterError: If it is missing or damaged, or wants what is not supported.
    """
    config = _read_config(name, path)
    _check_config(name, config)
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    try:
        weights = load_file(Path(path) / _WEIGHTS)
    except (OSError, SafetensorError) as exc:
        raise AdapterError(f"adapter {name!r}: {_WEIGHTS} in {path} cannot be read: {exc}") from exc
    found: dict[str, dict[str, Tensor]] = {}
    for key, weight in weights.items():
        target, part = _split_key(name, key)
        found.setdefault(target, {})[part] = weight
    return Adapter(name, {target: _low_rank(name, target, parts, scale) for target, parts in found.items()})


def _read_config(name: str, path: str) -> dict[str, Any]:
    try:
        config = json.loads((Path(path) / _CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise AdapterError(f"adapter {name!r}: {_CONFIG} in {path} cannot be read: {exc}") from exc
    numbers = [config.get(key) for key in ("r", "lora_alpha")] if isinstance(config, dict) else []
    if len(numbers) != 2 or not all(isinstance(number, int | float) and number > 0 for number in numbers):
        raise AdapterError(f"adapter {name!r}: {_CONFIG} in {path} has no r and lora_alpha above 0")
    return config  # type: ignore[no-any-return]


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    refused = {key: config[key] for key in _UNSUPPORTED if config.get(key)}
    refused |= {
        key: value
        for key, value in config.items()
        if value and key.endswith("_config") and key not in _HARMLESS_CONFIGS
    }
    if config.get("peft_type") != "LORA":
        refused["peft_type"] = config.get("peft_type")
    if config.get("bias", "none") != "none":
        refused["bias"] = config["bias"]
    if str(config.get("init_lora_weights", "")).lower().startswith(_CHANGED_BASE):
        refused["init_lora_weights"] = config["init_lora_weights"]
    if refused:
        wishes = ", ".join(f"{key} = {value!r}" for key, value in refused.items())
        raise AdapterError(f"adapter {name!r} is not supported: {wishes}; plain LoRA of linear layers is")


def _split_key(name: str, key: str) -> tuple[str, str]:
    """Return the linear layer that a weight belongs to, and whether it is its A or B."""
    for suffix, part in _PARTS.items():
        if key.startswith(_PREFIX) and key.endswith(suffix):
            return key.removeprefix(_PREFIX).removesuffix(suffix), part
    raise AdapterError(f"adapter {name!r} is not supported: it has a weight {key}; plain LoRA of linear layers is")


def _low_rank(name: str, target: str, parts: Mapping[str, Tensor], scale: float) -> LowRank:
    a, b = parts.get("A"), parts.get("B")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        shapes = {part: list(weight.shape) for part, weight in parts.items()}
        raise AdapterError(f"adapter {name!r}: {target} has lora_A and lora_B of shapes {shapes}: they must match")
    return LowRank(a.float(), b.float() * scale)


class AdapterRows:
    """Which of the rows that are being computed belong to which adapter; the layers of a model share one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_rows = 0
        self.groups: list[tuple[int, Tensor | None]] = []  # adapter's number, its rows; None: all of them

    def set(self, adapters: NDArray[np.int64] | None) -> None:
        """Say which adapter each row has, [num_rows]; 0: none. None: none has any."""
        self.groups = []
        if adapters is None:
            return
        self.num_rows = len(adapters)
        for number in np.unique(adapters).tolist():
            rows = np.flatnonzero(adapters == number)
            if number:
                every = len(rows) == len(adapters)
                self.groups.append((number, None if every else torch.from_numpy(rows).to(self._device)))


@dataclass(slots=True, frozen=True)
class _Part:
    """A LowRank as two linear layers."""

    down: Linear
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


@dataclass(slots=True, frozen=True)
class AdaptedLinear:
    """A Linear whose rows get what their adapters add."""

    inner: Linear
    parts: Mapping[int, _Part]  # by the adapter's number; those without a part leave the layer as it is
    rows: AdapterRows

    def __call__(self, x: Tensor) -> Tensor:
        """Return y."""
        y = self.inner(x)
        assert not self.rows.groups or len(x) == self.rows.num_rows, "a layer sees other rows than the batch has"
        for number, rows in self.rows.groups:
            part = self.parts.get(number)
            if part is not None:
                y = y + part(x) if rows is None else y.index_add(0, rows, part(x[rows]))
        return y

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(y)."""
        return F.silu(self(x)) if self.rows.groups else self.inner.silu(x)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y + other."""
        return self(x) + other if self.rows.groups else self.inner.add(x, other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y * other."""
        return self(x) * other if self.rows.groups else self.inner.mul(x, other)


class _Site(NamedTuple):
    """A place in the model where adapters can have a part."""

    parts: dict[int, _Part]
    pieces: Sequence["Piece"]


class Adapters:
    """An engine's adapters for the layers of one model. A number is given once, whoever comes and goes.

    Args:
        adapters: Loaded ones, by number, from 1 on.
        factory: Makes the low-rank layers, as the model's own.
        is_open: Whether `add` may be called, so that all layers must be ready for it.
    """

    def __init__(
        self,
        adapters: Mapping[int, Adapter],
        factory: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_open: bool = False,
    ) -> None:
        self.rows = AdapterRows(device)
        self.is_open = is_open
        self.numbers = {adapter.name: number for number, adapter in adapters.items()}  # what requests can name
        self._adapters, self._factory, self._dtype, self._device = dict(adapters), factory, dtype, device
        self._last_number = max(adapters, default=0)
        self._sites: list[_Site] = []
        self._unused = {number: set(adapter.parts) for number, adapter in adapters.items()}

    def renew(self) -> "Adapters":
        """Return the same adapters, for the layers of a model that is to be loaded again."""
        new = Adapters(self._adapters, self._factory, self._dtype, self._device, is_open=self.is_open)
        new.numbers, new._last_number = self.numbers, self._last_number
        return new

    def add(self, adapter: Adapter) -> None:
        """Give every layer its part of a further adapter; all or nothing.

        Raises:
            AdapterError: If a part's shape is not that of its layer, or it has no layer.
        """
        assert self.is_open
        unused, made = set(adapter.parts), []
        for site in self._sites:
            own = [adapter.parts.get(piece.name) for piece in site.pieces]
            if any(own):
                unused -= {piece.name for piece in site.pieces}
                made.append((site.parts, self._make_part(adapter.name, own, site.pieces)))
        _check_used(adapter.name, unused)
        self._last_number += 1
        for parts, part in made:
            parts[self._last_number] = part
        self._adapters[self._last_number] = adapter
        self.numbers[adapter.name] = self._last_number

    def free(self, number: int) -> None:
        """Free an adapter that no row will have again."""
        del self._adapters[number]
        for site in self._sites:
            site.parts.pop(number, None)

    @property
    def nameless(self) -> set[int]:
        """The adapters that no further request can name."""
        return self._adapters.keys() - self.numbers.values()

    def wrap(self, linear: Linear, pieces: Sequence["Piece"]) -> Linear:
        """Return a layer that applies the adapters, or the same one if none has a part in it.

        Args:
            linear: The model's layer.
            pieces: The model's layers that it is made of, one below the other.

        Raises:
            AdapterError: If a part's shape is not that of its layer.
        """
        parts = {}
        for number, adapter in self._adapters.items():
            own = [adapter.parts.get(piece.name) for piece in pieces]
            if any(own):
                self._unused[number] -= {piece.name for piece in pieces}
                parts[number] = self._make_part(adapter.name, own, pieces)
        if self.is_open:
            self._sites.append(_Site(parts, pieces))
        return AdaptedLinear(linear, parts, self.rows) if parts or self.is_open else linear

    def check_all_used(self) -> None:
        """See that every part has found its layer.

        Raises:
            AdapterError: If not: what is no linear layer of a decoder block cannot be adapted.
        """
        for number, unused in self._unused.items():
            _check_used(self._adapters[number].name, unused)

    def _make_part(self, name: str, own: Sequence[LowRank | None], pieces: Sequence["Piece"]) -> _Part:
        """Put the pieces' parts together: the A's one below the other, the B's on a diagonal."""
        downs, ups = [], []
        for part, piece in zip(own, pieces, strict=True):
            if part is None:
                ups.append(torch.zeros(piece.num_out, 0))
                continue
            shape = (part.b.shape[0], part.a.shape[1])
            if shape != (piece.num_out, piece.num_in):
                raise AdapterError(
                    f"adapter {name!r} is of another model: its {piece.name} is {list(shape)}, the model's "
                    f"{[piece.num_out, piece.num_in]}"
                )
            downs.append(part.a)
            ups.append(part.b if piece.order is None else part.b[piece.order])
        make = self._factory.make
        stacked = torch.cat(downs), torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        down, up = (weight.to(self._device, self._dtype) for weight in stacked)
        return _Part(make(down, can_quantize=False), make(up, can_quantize=False))


def _check_used(name: str, unused: set[str]) -> None:
    if unused:
        raise AdapterError(
            f"adapter {name!r} is not supported: its targets {', '.join(sorted(unused)[:3])} are no linear layers of "
            "this model's decoder blocks"
        )


@dataclass(slots=True, frozen=True)
class Piece:
    """One of the model's linear layers, as a checkpoint has it, in one of the engine's."""

    name: str
    num_out: int
    num_in: int
    order: Tensor | None = None  # [num_out], where the engine's outputs are in the checkpoint's; None: as they are
