"""Randomness by name: every random decision of a verifier is a pure function of (seed, position, purpose).

Noise comes from a counter-based hash, in the manner of "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al.,
2011) with the multipliers of SplitMix64 (Steele et al., 2014). The noise of a token depends on the keys and its id
alone, so it is the same bits in any tree, any batch, any subset of the vocabulary and on any device: all steps are
integer operations, one table lookup and single IEEE additions and multiplications.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]

_HOST: Final = torch.device("cpu")
_MASK: Final = (1 << 64) - 1
_WEYL: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB

_TARGET: Final = 1
_RESIDUAL: Final = 2
_COIN: Final = 3

_BITS: Final = 10
"""Table cells per octave of the uniform number, as a power of two; interpolation is then good to 1e-7, float32's own
step.
"""
_SHIFT: Final = 23 - _BITS
_POSITIVE: Final = 256 << _BITS
_OFFSET: Final = (256 - 127) << _BITS


def _mix(value: int) -> int:
    """SplitMix64's finaliser, on 64-bit unsigned integers."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def draw_seed(seed: int, *keys: int) -> int:
    """A seed of its own for every tuple of keys under `seed`: (request seed, output index), (seed, position), ...

    Args:
        seed: any integer; only its lowest 64 bits count.
        keys: any integers.

    Returns:
        An integer in 0..2**63 - 1 that looks independent of those for other keys.
    """
    state = _mix((seed + _WEYL) & _MASK)
    for key in keys:
        state = _mix(((state ^ (key & _MASK)) + _WEYL) & _MASK)
    return state >> 1


@lru_cache(maxsize=8)
def token_keys(size: int, device: torch.device) -> torch.Tensor:
    """(size,) int64: one well-mixed constant per token id."""
    with np.errstate(over="ignore"):
        key = (np.arange(1, size + 1, dtype=np.uint64)) * np.uint64(_WEYL)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(_MIX_1)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(_MIX_2)
        key ^= key >> np.uint64(31)
    return torch.from_numpy(key.view(np.int64)).to(device)


@lru_cache(maxsize=8)
def _gumbel_table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Height at the start of each cell and slope per unit of the low mantissa bits, both float32.

    A hash h, uniform over signed 64-bit integers, is turned into a float: its sign chooses one half of the Gumbel
    distribution, its size s = |h| / 2**64 in (0, 1/2) is the tail probability there. A cell is one value of (sign,
    exponent, first mantissa bits), so that both tails are resolved down to 2**-64. Cells between the two halves belong
    to exponents that cannot occur.
    """
    height, slope = np.zeros(_POSITIVE + (64 << _BITS), np.float32), np.zeros(_POSITIVE + (64 << _BITS), np.float32)
    octave, cell = np.arange(64, dtype=np.float64)[:, None], np.arange((1 << _BITS) + 1, dtype=np.float64)
    edges = np.minimum((np.exp2(octave - 64) * (1 + cell / (1 << _BITS))), 0.5)
    for start, quantile in ((0, -np.log(-np.log(edges))), (_POSITIVE, -np.log(-np.log1p(-edges)))):
        stop = start + (64 << _BITS)
        height[start:stop] = quantile[:, :-1].ravel()
        slope[start:stop] = (np.diff(quantile, axis=1) / (1 << _SHIFT)).ravel()
    return torch.from_numpy(height).to(device), torch.from_numpy(slope).to(device)


def hashes(key: int, token_keys: torch.Tensor) -> torch.Tensor:
    """(m,) int64, uniform over all of them: one for each token under one key."""
    hash_m = token_keys ^ _signed(_mix(key))
    hash_m *= _signed(_MIX_1)
    hash_m ^= hash_m >> 32
    hash_m *= _signed(_MIX_2)
    return hash_m


def gumbel_noise(key: int, token_keys: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of some tokens under one key.

    Args:
        key: from `draw_seed`.
        token_keys: (m,) int64 constants of the tokens.

    Returns:
        (m,) float32, the same bits for a token whatever the others are.
    """
    bits_m = hashes(key, token_keys).to(torch.float32).view(torch.int32)
    cell_m = (bits_m >> _SHIFT).add_(_OFFSET)
    height, slope = _gumbel_table(token_keys.device)
    noise_m = bits_m.bitwise_and_((1 << _SHIFT) - 1).to(torch.float32)
    return noise_m.mul_(slope.index_select(0, cell_m)).add_(height.index_select(0, cell_m))


@lru_cache(maxsize=8)
def host_tables(size: int) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Token keys, heights and slopes as arrays."""
    height, slope = _gumbel_table(_HOST)
    return token_keys(size, _HOST).numpy(), height.numpy(), slope.numpy()


def noise_on_host(key: int, keys_m: npt.NDArray[np.int64], height: Floats, slope: Floats) -> Floats:
    """`gumbel_noise` in NumPy: the same bits in half the time, since a small operation is dispatched faster."""
    hash_m = keys_m ^ np.int64(_signed(_mix(key)))
    hash_m *= np.int64(_signed(_MIX_1))
    hash_m ^= hash_m >> 32
    hash_m *= np.int64(_signed(_MIX_2))
    bits_m = hash_m.astype(np.float32).view(np.int32)
    cell_m = bits_m >> _SHIFT
    cell_m += _OFFSET
    bits_m &= (1 << _SHIFT) - 1
    noise_m = bits_m.astype(np.float32)
    noise_m *= slope.take(cell_m)
    noise_m += height.take(cell_m)
    return noise_m


def _race(key: int, weights_v: torch.Tensor) -> int:
    """argmax of weights plus Gumbel noise; the lowest index of equal scores. A NaN weight wins, so that it is
    noticed.
    """
    if weights_v.dtype.itemsize < 4:
        weights_v = weights_v.float()
    if weights_v.device.type != "cpu":
        return int((gumbel_noise(key, token_keys(len(weights_v), weights_v.device)) + weights_v).argmax())
    scores_v = weights_v.numpy()
    keys_v, height, slope = host_tables(len(scores_v))
    allowed_m = np.flatnonzero(scores_v != -np.inf)
    if 0 < len(allowed_m) < len(scores_v) // 2:  # the forbidden need no noise
        noise_m = noise_on_host(key, keys_v.take(allowed_m), height, slope)
        return int(allowed_m[(noise_m + scores_v.take(allowed_m)).argmax()])
    return int((noise_on_host(key, keys_v, height, slope) + scores_v).argmax())


class KeyedDraws:
    """The randomness of one sequence in one step (see `Draws`), with no state: equal keys give equal results.

    Args:
        seed: of the sequence, as from `draw_seed(request seed, output index)`. A drafter's own draws need a seed of
            their own: with this one they would not be independent of the target's.
        position: index in the text of the token after the root, so that `depth` d decides the token at position + d.
    """

    __slots__ = ("position", "seed")

    def __init__(self, seed: int, position: int) -> None:
        self.seed, self.position = seed, position

    def gumbel(self, depth: int, weights_v: torch.Tensor) -> int:
        """argmax(log p + noise): a draw from softmax(weights_v); noise is keyed by (seed, position + depth, token)."""
        return _race(draw_seed(self.seed, self.position + depth, _TARGET), weights_v)

    def noise(self, depth: int, like_v: torch.Tensor) -> torch.Tensor:
        """(v,) float32, on the device of `like_v`: the noise that `gumbel` adds at this depth."""
        return gumbel_noise(
            draw_seed(self.seed, self.position + depth, _TARGET), token_keys(len(like_v), like_v.device)
        )

    def bernoulli(self, depth: int, trial: int, probability: float) -> bool:
        """True with the given probability, to 2**-53; keyed by (seed, position + depth, trial)."""
        coin = draw_seed(self.seed, self.position + depth, _COIN, trial)
        return (coin >> 10) * 2.0**-53 < probability

    def categorical(self, depth: int, probabilities_v: torch.Tensor) -> int:
        """An index of positive probability; keyed by (seed, position + depth, token), apart from `gumbel`'s noise."""
        return _race(draw_seed(self.seed, self.position + depth, _RESIDUAL), probabilities_v.log())
