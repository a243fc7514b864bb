"""The linear layers that a model runs on: plain, packed for the CPU's bf16 kernels, or 4-bit for few rows.

Each takes a step's rows and can do what comes right behind it in a transformer, which the packed kernel has for free.
The packed and the 4-bit kernel are torch operations without a promise to stay: both are tried before they are used.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from torch import Tensor

from ringserve.engine.config import Quantization

logger = logging.getLogger(__name__)

GROUP = 32  # columns that share a scale and a zero
_LEVELS = 15  # steps between the lowest and the highest weight of a group
# Half a bf16 step of the largest weight is 2**-9 of it. The weights, their scale and their zero are each rounded so:
# a grid of 16 levels comes back within 0.006 (measured on the default model), anything else is 0.067 off.
_LOSSLESS_ERROR = 2**-7
_MAX_INT4_ROWS = 5  # 4-bit is faster up to 4 rows and level at 5 or 6 (Zen 4; 6 on a machine with AMX)
_SLICE_WEIGHTS = 2**16  # quantized at once: they fit into a core's cache
_TILE_ROWS = 32  # of a deterministic layer


class Linear(Protocol):
    """y = x @ weight.T + bias, for x of [num_rows, in_features]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return y."""

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(y)."""

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y + other."""

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y * other."""


@dataclass(slots=True, frozen=True)
class PlainLinear:
    """torch's own, for every dtype and device."""

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return y."""
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(y)."""
        return F.silu(self(x), inplace=True)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y + other."""
        return self(x).add_(other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y * other."""
        return self(x).mul_(other)


@dataclass(slots=True, frozen=True)
class PackedLinear:
    """bf16 on a CPU, the weight reordered for oneDNN: faster than F.linear, most of all for few rows."""

    weight: Tensor  # opaque
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return y."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(y)."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return y

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y + other."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")
        return y

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y * other."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "mul")
        return y


@dataclass(slots=True, frozen=True)
class Int4Linear:
    """4-bit weights for few rows, where reading the weights is what takes the time, and `many` for more."""

    weight: Tensor  # opaque
    scales_and_zeros: Tensor  # [in_features / GROUP, out_features, 2]
    bias: Tensor | None
    many: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return y."""
        return self.many(x) if len(x) > _MAX_INT4_ROWS else self._few(x)

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(y)."""
        return self.many.silu(x) if len(x) > _MAX_INT4_ROWS else F.silu(self._few(x), inplace=True)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y + other."""
        return self.many.add(x, other) if len(x) > _MAX_INT4_ROWS else self._few(x).add_(other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y * other."""
        return self.many.mul(x, other) if len(x) > _MAX_INT4_ROWS else self._few(x).mul_(other)

    def _few(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, GROUP, self.scales_and_zeros)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(slots=True, frozen=True)
class TiledLinear:
    """Always the same number of rows at once, so that one kernel does all and a row's result is its own affair.

    What comes behind the product is done apart, for it is so where a batch mate has an adapter (adapters.py): a kernel
    that does both rounds once less.
    """

    inner: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return y."""
        return self._tiled(self.inner, x)

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(y)."""
        return self._tiled(lambda rows: F.silu(self.inner(rows)), x)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y + other."""
        return self._tiled(lambda rows, others: self.inner(rows) + others, x, other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y * other."""
        return self._tiled(lambda rows, others: self.inner(rows) * others, x, other)

    @staticmethod
    def _tiled(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        num_rows = len(inputs[0])
        padding = max(-(-num_rows // _TILE_ROWS), 1) * _TILE_ROWS - num_rows
        padded = [F.pad(rows, (0, 0, 0, padding)).view(-1, _TILE_ROWS, rows.shape[1]) for rows in inputs]
        return torch.cat([function(*tiles) for tiles in zip(*padded, strict=True)])[:num_rows]


class LinearFactory:
    """Makes a model's linear layers for one machine and one configuration, and counts those that became 4-bit."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantization: Quantization, *, is_deterministic: bool
    ) -> None:
        self.num_made = 0
        self.num_int4 = 0
        self._is_deterministic = is_deterministic
        is_cpu_bf16 = device.type == "cpu" and dtype == torch.bfloat16
        self._can_pack = is_cpu_bf16 and _packing_works()
        self._quantization = quantization
        if not (is_cpu_bf16 and quantization != "none" and not is_deterministic and _int4_works()):
            self._quantization = "none"
        if quantization == "int4" and self._quantization == "none":
            logger.warning("int4 needs a CPU, bfloat16, and no --deterministic: the weights stay as they are")

    def make(self, weight: Tensor, bias: Tensor | None = None, *, can_quantize: bool = True) -> Linear:
        """Return a layer for a weight of [out_features, in_features]; the weight itself is kept only if it is used."""
        self.num_made += 1
        linear: Linear = PackedLinear(pack(weight), bias) if self._can_pack else PlainLinear(weight, bias)
        if self._is_deterministic:
            return TiledLinear(linear)
        if can_quantize and self._quantization != "none" and weight.shape[1] % GROUP == 0 and weight.shape[0] % 16 == 0:
            found = quantize_int4(weight, is_forced=self._quantization == "int4")
            if found is not None:
                self.num_int4 += 1
                return Int4Linear(*found, bias, linear)
        return linear


def pack(weight: Tensor) -> Tensor:
    """Reorder a bf16 weight [out_features, in_features] for `PackedLinear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def quantize_int4(weight: Tensor, *, is_forced: bool = False) -> tuple[Tensor, Tensor] | None:
    """Put each group of `GROUP` columns on a grid of 16 levels from its lowest to its highest weight.

    Returns:
        The packed weight and its scales and zeros; None if the weight is not on such a grid already, unless forced.
    """
    num_groups = weight.shape[1] // GROUP
    levels = torch.empty(len(weight), num_groups, GROUP, dtype=torch.int32, device=weight.device)
    scales_and_zeros = weight.new_empty(num_groups, len(weight), 2)
    step = max(1, _SLICE_WEIGHTS // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        groups = weight[rows].float().view(-1, num_groups, GROUP)
        scale, zero = _quantize(groups, levels[rows])
        scale, zero = scale.to(weight.dtype), zero.to(weight.dtype)
        if not is_forced and not _is_lossless(groups, levels[rows], scale, zero):
            return None
        scales_and_zeros[:, rows] = torch.cat((scale, zero), dim=-1).transpose(0, 1)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.view(weight.shape), 1)
    return packed, scales_and_zeros


def _quantize(groups: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Fill in the levels and return scale and zero; the kernel makes (level - 8) * scale + zero of them."""
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (highest - lowest).div_(_LEVELS)
    # A group of equal weights has no scale; any will do.
    levels.copy_(groups.sub(lowest).div_(scale.clamp_min(torch.finfo(torch.float32).tiny)).round_())
    return scale, lowest + scale * 8


def _is_lossless(groups: Tensor, levels: Tensor, scale: Tensor, zero: Tensor) -> bool:
    restored = levels.float().sub_(8).mul_(scale.float()).add_(zero.float())
    limits = groups.abs().amax(-1, keepdim=True) * _LOSSLESS_ERROR
    return bool((restored.sub_(groups).abs_() <= limits).all())  # a NaN is no grid either


@cache
def _packing_works() -> bool:
    """Whether this torch and CPU have the packed kernel and it says what F.linear says."""
    weight, bias, x, other = _probe_tensors()
    try:
        packed, plain = PackedLinear(pack(weight), bias), PlainLinear(weight, bias)
        pairs = [(packed(x), plain(x)), (packed.silu(x), plain.silu(x))]
        pairs += [(packed.add(x, other), plain.add(x, other)), (packed.mul(x, other), plain.mul(x, other))]
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as exc:
        return _refuse("packed bf16", exc)
    return _agree(pairs) or _refuse("packed bf16", "wrong results")


@cache
def _int4_works() -> bool:
    """Whether this torch and CPU have the 4-bit kernel and it says what F.linear says."""
    _, bias, x, _ = _probe_tensors()
    levels = torch.randint(0, _LEVELS + 1, (64, 2, GROUP), generator=torch.Generator().manual_seed(1))
    levels[..., 0], levels[..., 1] = 0, _LEVELS  # so that each group has all of its range
    weight = ((levels - 7) / 64.0).view(64, 2 * GROUP).bfloat16()
    try:
        found = quantize_int4(weight)
        if found is None:
            return _refuse("int4", "a grid that is not recognised")
        plain = PlainLinear(weight, bias)
        pairs = [(Int4Linear(*found, bias, plain)(rows), plain(rows)) for rows in (x[:1], x[:_MAX_INT4_ROWS])]
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as exc:
        return _refuse("int4", exc)
    return _agree(pairs) or _refuse("int4", "wrong results")


def _probe_tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return make(64, 64).bfloat16(), make(64).bfloat16(), make(9, 64).bfloat16(), make(9, 64).bfloat16()


def _agree(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.allclose(found, plain, rtol=0.03, atol=0.15) for found, plain in pairs)


def _refuse(what: str, why: object) -> bool:
    logger.warning("the %s kernel of this torch cannot be used (%s): linear layers stay plain", what, why)
    return False
