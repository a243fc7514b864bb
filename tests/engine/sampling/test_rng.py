import numpy as np
import pytest
import torch
from torch import Tensor

from ringserve.engine.sampling.rng import draw_keys, exponentials, race, splitmix64


def _keys(seed: int, count: int) -> Tensor:
    return torch.from_numpy(draw_keys(np.full(count, seed, np.uint64), np.arange(count, dtype=np.int64)))


def _uniforms(numbers: Tensor) -> np.ndarray:
    return (-numbers).exp().numpy()


def test_splitmix64_gives_the_published_first_outputs_of_seed_zero() -> None:
    states = np.arange(3) * (0x9E3779B97F4A7C15 - 2**64)
    for bits in (splitmix64(states), splitmix64(torch.from_numpy(states)).numpy()):
        assert bits.view(np.uint64).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_exponentials_follow_their_distribution_over_names_and_over_indexes(seed: int) -> None:
    names, nobody = torch.arange(100_000), torch.zeros(1, dtype=torch.int64)
    for numbers in (exponentials(_keys(seed, 1), names), exponentials(_keys(seed, 100_000), nobody)):
        assert numbers.min() > 0.0
        counts, _ = np.histogram(_uniforms(numbers), bins=100, range=(0.0, 1.0))
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert 60 < chi_square < 150  # 99 degrees of freedom


def test_neighbouring_seeds_indexes_and_names_are_not_correlated() -> None:
    names = torch.arange(50_000)
    first, second = (_uniforms(exponentials(_keys(seed, 1), names)) for seed in (1, 2))
    next_index = _uniforms(exponentials(_keys(1, 2)[1:], names))
    for other in (second, next_index):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.02
        assert abs(np.corrcoef(first[1:], other[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.02


def test_a_key_depends_on_its_own_seed_and_index_alone() -> None:
    alone = draw_keys(np.array([7], np.uint64), np.array([3]))
    mates = draw_keys(np.array([1, 7, 9], np.uint64), np.array([0, 3, 8]))
    assert mates[1] == alone[0]


def test_a_race_is_won_in_proportion_to_the_weights_in_whatever_order_they_stand() -> None:
    weights, names = torch.tensor([1.0, 0.0, 2.0, 5.0], dtype=torch.float64), torch.tensor([3, 14, 15, 92])
    keys, order = _keys(5, 80_000), torch.tensor([2, 3, 1, 0])
    drawn = race(weights.expand(80_000, 4), keys, names)
    counts = np.bincount(drawn.numpy(), minlength=4)
    assert np.abs(counts - np.array([10_000, 0, 20_000, 50_000])).max() < 600  # over 4 standard deviations
    assert torch.equal(order[race(weights[order].expand(80_000, 4), keys, names[order])], drawn)


def test_no_number_is_0_or_infinite() -> None:
    """The bits at both ends, which no seed can be made to give."""
    with pytest.MonkeyPatch.context() as patch:
        for bits in (0, -1):
            patch.setattr(
                "ringserve.engine.sampling.rng.splitmix64", lambda state, bits=bits: torch.full_like(state, bits)
            )
            number = exponentials(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).item()
            assert 0.0 < number < 40.0
