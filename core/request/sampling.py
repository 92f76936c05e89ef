"""The random key of a sampled token: a pure function, so a token never depends on its batch.

    key   = mix(seed, sample index, position)      position = index of the token in the sequence
    noise = gumbel(mix(key, vocabulary id))    kernels/sampling/sampling.py; argmax(logits + noise)

The mixer is splitmix64's finaliser (Steele, Lea & Flood 2014), exact in 64-bit integers on every
device.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """splitmix64's finaliser: a bijection of the 64-bit integers that scatters neighbours."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def token_key(seed: int, sample_index: int, position: int) -> int:
    """The unsigned 64-bit key for one token of one sample."""
    key = mix64(seed + GOLDEN)
    key = mix64(key ^ (sample_index + 2 * GOLDEN))
    return mix64(key ^ (position + 3 * GOLDEN))
