import pytest
import torch
from torch import Tensor

from ringserve.engine.weights.linear import (
    GROUP,
    Int4Linear,
    Linear,
    LinearFactory,
    PackedLinear,
    PlainLinear,
    Quantization,
    TiledLinear,
    quantize_int4,
)

CPU = torch.device("cpu")


def factory(
    dtype: torch.dtype = torch.bfloat16, quantization: Quantization = "auto", **settings: bool
) -> LinearFactory:
    return LinearFactory(dtype, CPU, quantization, **{"is_deterministic": False, **settings})


def random_weight(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).to(dtype)


def grid_weight() -> Tensor:
    """As a checkpoint that was 4-bit once: 16 levels a group, its own scale and zero, rounded to bf16."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(0, 16, (96, 128 // GROUP, GROUP), generator=generator).float()
    levels[..., 0], levels[..., 1] = 0, 15  # such formats lay the grid from the lowest weight to the highest
    scales = torch.rand(96, 128 // GROUP, 1, generator=generator) + 0.01
    zeros = -15 * scales * torch.rand(96, 128 // GROUP, 1, generator=generator)
    return (levels * scales + zeros).view(96, 128).bfloat16()


def assert_does_all(linear: Linear, weight: Tensor, bias: Tensor | None, *, num_rows: int) -> None:
    x = torch.randn(num_rows, weight.shape[1]).to(weight.dtype)
    other = torch.randn(num_rows, weight.shape[0]).to(weight.dtype)
    y = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    wanted = (y, y * y.sigmoid(), y + other.float(), y * other.float())
    found = (linear(x), linear.silu(x), linear.add(x, other), linear.mul(x, other))
    for one, another in zip(found, wanted, strict=True):
        assert one.dtype == weight.dtype
        assert (one.float() - another).norm() <= 0.01 * another.norm() + 1e-6


@pytest.mark.parametrize("num_rows", [0, 1, 5, 6, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization", "is_deterministic"),
    [
        (torch.float32, "auto", False),
        (torch.float16, "none", False),
        (torch.bfloat16, "none", False),
        (torch.bfloat16, "auto", False),
        (torch.bfloat16, "auto", True),
        (torch.float32, "none", True),
    ],
)
def test_every_kind_does_what_follows_the_product(
    dtype: torch.dtype, quantization: Quantization, is_deterministic: bool, has_bias: bool, num_rows: int
) -> None:
    weight = grid_weight().to(dtype)
    bias = torch.randn(96).to(dtype) if has_bias else None
    linear = factory(dtype, quantization, is_deterministic=is_deterministic).make(weight, bias)
    assert_does_all(linear, weight, bias, num_rows=num_rows)


def test_a_weight_on_a_grid_of_16_levels_becomes_4_bit_and_loses_nothing() -> None:
    made = factory()
    linear = made.make(grid_weight())
    assert isinstance(linear, Int4Linear)
    assert (made.num_made, made.num_int4) == (1, 1)
    restored = torch.cat([linear(rows) for rows in torch.eye(128).bfloat16().split(4)]).T
    limit = grid_weight().view(96, -1, GROUP).abs().amax(-1, keepdim=True) / 128
    assert ((restored - grid_weight()).view(96, -1, GROUP).abs() <= limit).all()


@pytest.mark.parametrize("spoilt", [None, 0.03, float("nan")])
def test_a_weight_beside_the_grid_stays_as_it_is(spoilt: float | None) -> None:
    weight = random_weight() if spoilt is None else grid_weight()
    if spoilt is not None:
        weight[95, 127] += spoilt * weight[95, 96:].abs().max()  # the very last group alone
        weight[95, 96:] = weight[95, 96:].flip(0)
    assert quantize_int4(weight) is None
    assert isinstance(factory().make(weight), PackedLinear)


def test_groups_of_equal_weights_are_on_a_grid() -> None:
    weight = torch.full((96, 128), 0.37).bfloat16()
    found = quantize_int4(weight)
    assert found is not None
    linear = Int4Linear(*found, None, PlainLinear(weight, None))
    assert_does_all(linear, weight, None, num_rows=2)


def test_what_may_be_4_bit_is_the_configurations_choice() -> None:
    assert isinstance(factory(quantization="none").make(grid_weight()), PackedLinear)
    assert isinstance(factory(quantization="int4").make(random_weight()), Int4Linear)
    assert isinstance(factory(quantization="int4").make(random_weight(), can_quantize=False), PackedLinear)
    assert isinstance(factory(torch.float32).make(grid_weight().float()), PlainLinear)


def test_int4_that_cannot_be_had_is_said(caplog: pytest.LogCaptureFixture) -> None:
    factory(torch.float32, "int4")
    assert "int4 needs a CPU, bfloat16" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_layer_gives_a_row_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    linear = factory(dtype, is_deterministic=True).make(random_weight(dtype))
    assert isinstance(linear, TiledLinear)
    rows = torch.randn(70, 128).to(dtype)
    together = linear(rows)
    for start, end in ((0, 1), (3, 8), (30, 70)):
        assert torch.equal(linear(rows[start:end]), together[start:end])
