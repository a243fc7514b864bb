import numpy as np

from engine.rng import splitmix64, uniforms


def _draws(seed: int, count: int) -> np.ndarray:
    return uniforms(np.full(count, seed, np.uint64), np.arange(count, dtype=np.uint64))


def test_splitmix64_gives_the_published_first_outputs_of_seed_zero() -> None:
    gamma = np.uint64(0x9E3779B97F4A7C15)
    states = np.arange(3, dtype=np.uint64) * gamma
    assert splitmix64(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniforms_are_spread_evenly_below_one() -> None:
    for seed in (0, 1, 2**64 - 1):
        draws = _draws(seed, 100_000)
        assert 0.0 <= draws.min() <= draws.max() < 1.0
        counts, _ = np.histogram(draws, bins=100, range=(0.0, 1.0))
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert 60 < chi_square < 150  # 99 degrees of freedom


def test_neighbouring_seeds_are_not_correlated() -> None:
    first, second = _draws(1, 50_000), _draws(2, 50_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], second[:-1])[0, 1]) < 0.02


def test_a_draw_depends_on_its_own_seed_and_index_alone() -> None:
    alone = uniforms(np.array([7], np.uint64), np.array([3], np.uint64))
    mates = uniforms(np.array([1, 7, 9], np.uint64), np.array([0, 3, 8], np.uint64))
    assert mates[1] == alone[0]
