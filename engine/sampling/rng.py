"""Random numbers without state: a draw depends on (seed, output index) alone, never on batch mates or history.

A token is drawn by a race: each candidate gets a time of its own, exponentially distributed with its weight as the
rate, and the first to arrive is the one. So what a batch's shape does to the last bits of the logits changes a token
only where two come in almost together; a running sum passes its target elsewhere as soon as any of its many terms is
another.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Bits = TypeVar("Bits", Tensor, NDArray[np.int64])  # numpy's are faster for a few, a device has the others

_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as int64, whose products are modulo 2**64 in arrays and tensors
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)
_NUM_BITS = 52  # of a uniform number: a double holds them and one half more exactly, so none is 0 or 1


def splitmix64(state: Bits) -> Bits:
    """Mix 64-bit states into 64 random bits each, elementwise; both int64.

    Source: splitmix64, Sebastiano Vigna, 2015 (public domain).
    """
    bits = state + _GAMMA
    bits = (bits ^ _shifted(bits, _SHIFTS[0])) * _MULTIPLIERS[0]
    bits = (bits ^ _shifted(bits, _SHIFTS[1])) * _MULTIPLIERS[1]
    return bits ^ _shifted(bits, _SHIFTS[2])


def draw_keys(seeds: NDArray[np.uint64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what each (seed, output index) pair draws by, [n] int64; both [n].

    The seed is mixed first, so that neighbouring seeds do not give shifted copies of one sequence.
    """
    return splitmix64(splitmix64(seeds.view(np.int64)) + indexes * _GAMMA)


def race(weights: Tensor, keys: Tensor, names: Tensor) -> Tensor:
    """Draw one column a row, [num_rows] int64, with a probability in proportion to its weight.

    Args:
        weights: [num_rows, num_columns] fp64, not negative; a row of zeros gives any column.
        keys: [num_rows] int64, of `draw_keys`.
        names: [num_columns] or [num_rows, num_columns] int64, what a column's time depends on beside the key: under
            the same name it has the same time in whatever order the columns stand.
    """
    return (weights / exponentials(keys[:, None], names)).argmax(dim=1)


def exponentials(keys: Tensor, names: Tensor) -> Tensor:
    """Return exponentially distributed numbers of mean 1, fp64, above 0; for int64 that broadcast."""
    bits = _shifted(splitmix64(keys + names * _GAMMA), 64 - _NUM_BITS)
    return bits.double().add_(0.5).mul_(-(2.0**-_NUM_BITS)).log1p_().neg_()  # log would wake MKL's threads for a few


def _shifted(bits: Bits, count: int) -> Bits:
    """Shift to the right and fill with zeros; alone it fills with the sign."""
    shifted: Bits = (bits >> count) & (2 ** (64 - count) - 1)
    return shifted
