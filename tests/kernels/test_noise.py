"""The random noise: known answers, uniformity, independence; torch and Triton give equal bits."""

import math

import pytest
import torch

from nanovllm.kernels._triton import HAS_TRITON, tl, triton
from nanovllm.kernels.noise import (
    gumbel,
    make_key,
    random_bits,
    random_bits_device,
    row_words_device,
    uniform_device,
    uniform_from_bits,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = torch.arange(40_000)


def rows(seeds: list[int], positions: list[int]) -> tuple[torch.Tensor, ...]:
    keys = [make_key(seed, 0) for seed in seeds]
    columns = ([low for low, _ in keys], [high for _, high in keys], positions)
    return tuple(torch.tensor(column, dtype=torch.int32) for column in columns)


def assert_uniform(cells: torch.Tensor, num_cells: int) -> None:
    """Chi-square against equal counts, as a normal score; 4.5 is one chance in 150,000."""
    counts = torch.bincount(cells.flatten(), minlength=num_cells).double()
    expected = cells.numel() / num_cells
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - (num_cells - 1)) / math.sqrt(2 * (num_cells - 1)) < 4.5


def test_key_known_answers():
    assert make_key(0, 0) == (956087953, 595752380)
    assert make_key(0, 1) == (-1765376928, 791848836)
    assert make_key(-1, 0) == (-1124335559, 1389303178)
    assert make_key(2**64 - 1, 0) == (-1594869885, 2038781786)
    assert make_key(10**40, 3) == (660444458, -1822910594)


def test_bits_known_answers():
    key_lo = torch.tensor([0, 1, -1, 2**31 - 1], dtype=torch.int32)
    key_hi = torch.tensor([0, 0, -(2**31), 123456789], dtype=torch.int32)
    positions = torch.tensor([0, 1, 40_000, 7], dtype=torch.int32)
    bits = random_bits(key_lo, key_hi, positions, torch.tensor([0, 1, 151_935]))
    assert bits.tolist() == [
        [0, 910660454, 3511774990],
        [3518637774, 4014660033, 4163543541],
        [2969650079, 2027014816, 2461319455],
        [1184182523, 3013196323, 1081638880],
    ]


def test_keys_differ_for_all_seeds_and_samples():
    seeds = [*range(-500, 500), 2**32, 2**63, 2**64, 2**64 + 1, -(2**63), -(2**64), 2**128]
    keys = {make_key(seed, sample) for seed in seeds for sample in range(8)}
    assert len(keys) == len(seeds) * 8
    assert all(-(2**31) <= half < 2**31 for key in keys for half in key)


def test_uniform_is_open_at_both_ends_and_noise_is_finite():
    """With 24 bits and a half the largest value rounded to 1 and its noise was infinite."""
    uniform = uniform_from_bits(torch.tensor([0, 2**31, 2**32 - 1]))
    assert uniform.tolist() == [2.0**-24, 0.5 + 2.0**-24, 1 - 2.0**-24]
    assert torch.isfinite(-torch.log(-torch.log(uniform))).all()


@pytest.mark.parametrize("shift", [20, 9], ids=["highest bits", "lowest bits used"])
@pytest.mark.parametrize(
    ("seeds", "positions"),
    [(list(range(32)), [0] * 32), ([7] * 32, list(range(32)))],
    ids=["adjacent seeds", "adjacent positions"],
)
def test_bits_are_uniform_over_tokens(seeds, positions, shift):
    bits = random_bits(*rows(seeds, positions), VOCAB)
    assert_uniform((bits >> shift) & 4095, 4096)
    for row in bits:
        assert_uniform((row >> shift) & 255, 256)


@pytest.mark.parametrize("token_id", [0, 1, 151_935])
def test_bits_are_uniform_over_positions_and_seeds(token_id):
    counter = torch.arange(100_000, dtype=torch.int32)
    key = torch.full_like(counter, 5)
    for columns in ((key, key, counter), (counter, key, key), (key, counter, key)):
        bits = random_bits(*columns, torch.tensor([token_id]))[:, 0]
        assert_uniform(bits >> 22, 1024)
        assert_uniform(((bits[1:] >> 27) << 5) | (bits[:-1] >> 27), 1024)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [(list(range(48)), [9] * 48), ([3] * 48, list(range(48)))],
    ids=["adjacent seeds", "adjacent positions"],
)
def test_rows_are_not_correlated(seeds, positions):
    bits = random_bits(*rows(seeds, positions), VOCAB)
    correlation = torch.corrcoef(uniform_from_bits(bits)).fill_diagonal_(0)
    assert correlation.abs().max().item() * math.sqrt(len(VOCAB)) < 5
    assert_uniform(((bits[1:] >> 26) << 6) | (bits[:-1] >> 26), 4096)


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 64, 1024])
def test_neighbouring_tokens_are_not_correlated(distance):
    bits = random_bits(*rows(list(range(32)), [0] * 32), VOCAB)
    assert_uniform(((bits[:, distance:] >> 26) << 6) | (bits[:, :-distance] >> 26), 4096)


def test_gumbel_has_its_mean_and_variance():
    noise = gumbel(*rows(list(range(32)), [0] * 32), VOCAB).double()
    assert noise.shape == (32, len(VOCAB))
    assert abs(noise.mean().item() - 0.5772156649) < 0.006
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02


@triton.jit
def _noise_kernel(key_lo, key_hi, positions, token_ids, bits, uniform, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    word_1, word_2 = row_words_device(
        tl.load(key_lo + row), tl.load(key_hi + row), tl.load(positions + row)
    )
    row_bits = random_bits_device(word_1, word_2, tl.load(token_ids + lanes))
    tl.store(bits + row * BLOCK + lanes, row_bits.to(tl.int64))
    tl.store(uniform + row * BLOCK + lanes, uniform_device(row_bits))


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_triton_makes_the_same_bits_and_floats():
    columns = [c.to(DEVICE) for c in rows([*range(-4, 4), 2**70], [0, 1, 2, 3, 2**30, 5, 6, 7, 8])]
    token_ids = torch.arange(1024, dtype=torch.int32, device=DEVICE) * 149
    bits = torch.empty((9, 1024), dtype=torch.int64, device=DEVICE)
    uniform = torch.empty((9, 1024), dtype=torch.float32, device=DEVICE)
    _noise_kernel[(9,)](*columns, token_ids, bits, uniform, BLOCK=1024)
    expected = random_bits(*columns, token_ids)
    assert torch.equal(bits, expected)
    assert torch.equal(uniform, uniform_from_bits(expected))
