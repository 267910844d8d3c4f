"""Counter-based random noise: a draw is a function of (seed key, position, token id) alone.

No generator state exists, so a token does not depend on batch, chunking, preemption or device.
The 32-bit operations here are the definition; the torch and the Triton form give the same bits.
"""

import torch

from nanovllm.kernels._triton import tl, triton

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

# Odd 32-bit constants: golden ratio, murmur3's finaliser, and two wyhash-like multipliers. Triton
# reads globals only as constexpr; Python reads the numbers of the same name without underscore.
POSITION_STEP, ROW_MIX = 0x9E3779B9, 0x85EBCA6B
FMIX_1, FMIX_2 = 0x85EBCA6B, 0xC2B2AE35
TOKEN_STEP = 0x9E3779B1
ROUND_1, ROUND_2 = 0xD2B74407, 0xB1CE6E93

_POSITION_STEP, _ROW_MIX = tl.constexpr(POSITION_STEP), tl.constexpr(ROW_MIX)
_FMIX_1, _FMIX_2 = tl.constexpr(FMIX_1), tl.constexpr(FMIX_2)
_TOKEN_STEP = tl.constexpr(TOKEN_STEP)
_ROUND_1, _ROUND_2 = tl.constexpr(ROUND_1), tl.constexpr(ROUND_2)


def make_key(seed: int, sample_index: int) -> tuple[int, int]:
    """Return the key of one generation as two signed 32-bit integers (low, high).

    seed: any Python integer; sample_index: which of the request's n generations.
    """
    state = _splitmix64(1 if seed < 0 else 0)
    while True:
        state = _splitmix64(state ^ (seed & _MASK64))
        seed >>= 64
        if seed in (0, -1):
            break
    state = _splitmix64(state ^ (sample_index & _MASK64))
    return _signed32(state & _MASK32), _signed32(state >> 32)


def gumbel(
    key_lo: torch.Tensor, key_hi: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise, [n, num_tokens] float32.

    key_lo, key_hi, positions: [n] int32; token_ids: [num_tokens] integers
    """
    uniform = uniform_from_bits(random_bits(key_lo, key_hi, positions, token_ids))
    return -torch.log(-torch.log(uniform))


def uniform_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Map 32 random bits to the open interval (0, 1), float32, the same on every device.

    bits: int64 holding values in [0, 2**32)
    """
    # 23 bits, not 24: with the added half, 24 bits do not fit a float32, and the largest value
    # would round to 1, whose noise is infinite.
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def random_bits(
    key_lo: torch.Tensor, key_hi: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return 32 random bits for each row and token, [n, num_tokens] int64 in [0, 2**32).

    key_lo, key_hi, positions: [n] int32; token_ids: [num_tokens] integers
    """
    word_1, word_2 = _row_words(key_lo, key_hi, positions)
    bits = (token_ids.long() * TOKEN_STEP + word_1.unsqueeze(1)) & _MASK32
    bits = _fold_multiply(bits, ROUND_1) ^ word_2.unsqueeze(1)
    return _fold_multiply(bits, ROUND_2)


def _row_words(
    key_lo: torch.Tensor, key_hi: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix a row's key and position into two 32-bit words; a bijection of the key, [n] int64."""
    key_lo, key_hi, positions = (x.long() & _MASK32 for x in (key_lo, key_hi, positions))
    low = _fmix32((key_lo + positions * POSITION_STEP) & _MASK32)
    high = _fmix32(key_hi ^ low)
    word_1 = _fmix32((low + high * ROW_MIX) & _MASK32)
    return word_1, _fmix32(high ^ word_1)


def _fmix32(x: torch.Tensor) -> torch.Tensor:
    # Products of two 32-bit numbers may wrap an int64; their low 32 bits stay right.
    x = ((x ^ (x >> 16)) * FMIX_1) & _MASK32
    x = ((x ^ (x >> 13)) * FMIX_2) & _MASK32
    return x ^ (x >> 16)


def _fold_multiply(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Return low ^ high half of the 64-bit product: one wide multiply and one xor on a GPU."""
    product = x * factor
    return (product ^ (product >> 32)) & _MASK32


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


@triton.jit
def row_words_device(key_lo, key_hi, position):
    """Triton form of `_row_words`: int32 scalars to two uint32 scalars, once a program."""
    low = _fmix32_device(key_lo.to(tl.uint32) + position.to(tl.uint32) * _POSITION_STEP)
    high = _fmix32_device(key_hi.to(tl.uint32) ^ low)
    word_1 = _fmix32_device(low + high * _ROW_MIX)
    return word_1, _fmix32_device(high ^ word_1)


@triton.jit
def _fmix32_device(x):
    x = (x ^ (x >> 16)) * _FMIX_1
    x = (x ^ (x >> 13)) * _FMIX_2
    return x ^ (x >> 16)


@triton.jit
def random_bits_device(word_1, word_2, token_ids):
    """Triton form of `random_bits`: five integer operations a token."""
    bits = token_ids.to(tl.uint32) * _TOKEN_STEP + word_1
    bits = _fold_multiply_device(bits, _ROUND_1) ^ word_2
    return _fold_multiply_device(bits, _ROUND_2)


@triton.jit
def _fold_multiply_device(x, factor):
    product = x.to(tl.uint64) * factor
    return product.to(tl.uint32) ^ (product >> 32).to(tl.uint32)


@triton.jit
def uniform_device(bits):
    """Triton form of `uniform_from_bits`, the same floats without a slow int-to-float."""
    # Mantissa bits under exponent 0 are a float in [1, 2). The constant is 1 - 2**-24, and the
    # difference (2k + 1) * 2**-24 is exact.
    return ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
