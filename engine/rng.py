"""Random numbers without state: a draw depends on (seed, output index) alone, never on batch mates or history."""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_MANTISSA_SHIFT = np.uint64(11)  # keeps 53 bits, as many as a double holds exactly


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit states into 64 random bits each, elementwise.

    Source: splitmix64, Sebastiano Vigna, 2015 (public domain).
    """
    bits = state + _GAMMA
    bits = (bits ^ (bits >> _SHIFTS[0])) * _MULTIPLIERS[0]
    bits = (bits ^ (bits >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return bits ^ (bits >> _SHIFTS[2])


def uniforms(seeds: NDArray[np.uint64], indexes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index) pair; both [n] uint64.

    The seed is mixed first, so that neighbouring seeds do not give shifted copies of one sequence.
    """
    bits = splitmix64(splitmix64(seeds) + indexes * _GAMMA)
    return (bits >> _MANTISSA_SHIFT).astype(np.float64) * 2.0**-53
