"""Drawing tokens: the draw's distribution, greedy rows, odd inputs; Triton like the reference."""

import pytest
import torch

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.noise import make_key
from nanovllm.kernels.sample import sample, sample_reference, sample_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = [
    sample_reference,
    pytest.param(sample_triton, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def rows(temperatures: list[float], seed: int = 0) -> list[torch.Tensor]:
    """Columns of one int32 matrix, as the engine's batch rows are."""
    matrix = torch.zeros(len(temperatures), 7, dtype=torch.int32, device=DEVICE)
    matrix[:, 0] = torch.tensor(temperatures).view(torch.int32).to(DEVICE)
    keys = [make_key(seed + i, 0) for i in range(len(temperatures))]
    matrix[:, 2:4] = torch.tensor(keys, dtype=torch.int32).view(-1, 2).to(DEVICE)
    matrix[:, 5] = torch.arange(len(temperatures)) + 10
    return [matrix[:, 0].view(torch.float32), matrix[:, 2], matrix[:, 3], matrix[:, 5]]


def random_logits(n: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(n, vocab_size, device=DEVICE) * 3).to(dtype)


def test_draws_follow_the_softmax():
    num_draws, temperature = 100_000, 0.7
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.0], device=DEVICE)
    low, high = make_key(42, 0)
    key = torch.tensor([[low, high]], dtype=torch.int32, device=DEVICE).expand(num_draws, 2)
    positions = torch.arange(num_draws, dtype=torch.int32, device=DEVICE)
    temperatures = torch.full((num_draws,), temperature, device=DEVICE)
    _, token_ids = sample_reference(
        logits.expand(num_draws, 8), temperatures, key[:, 0], key[:, 1], positions
    )
    counts = torch.bincount(token_ids.cpu(), minlength=8).double()
    expected = torch.softmax(logits.cpu().double() / temperature, dim=0) * num_draws
    # 7 degrees of freedom: above 29.9 in one of 10,000 seeds.
    assert ((counts - expected) ** 2 / expected).sum().item() < 29.9


@pytest.mark.parametrize("draw", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_temperature_zero_takes_the_largest_logit(draw, dtype):
    logits = random_logits(3, 517, dtype)
    values, token_ids = draw(logits, *rows([0.0, 1e-6, 1e-12]))
    assert token_ids.dtype == torch.int32
    assert token_ids.tolist() == logits.argmax(dim=1).tolist()
    assert torch.equal(values, logits.float().amax(dim=1))


@pytest.mark.parametrize("draw", IMPLEMENTATIONS)
def test_tiny_temperatures_act_as_argmax(draw):
    logits = random_logits(4, 517)
    values, token_ids = draw(logits, *rows([1e-4, 2e-5, 1e-5, 1e-12]))
    assert token_ids.tolist() == logits.argmax(dim=1).tolist()
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("draw", IMPLEMENTATIONS)
def test_lowest_id_wins_a_tie(draw):
    logits = torch.zeros(2, 3000, device=DEVICE)
    logits[0, [7, 8, 2999]] = 1.0
    logits[1, [1030, 2050]] = 1.0
    _, token_ids = draw(logits, *rows([0.0, 0.0]))
    assert token_ids.tolist() == [7, 1030]


@pytest.mark.parametrize("draw", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_odd_logits_do_not_crash(draw, temperature):
    inf, nan = float("inf"), float("nan")
    logits = torch.zeros(5, 517, device=DEVICE)
    logits[0] = -inf
    logits[1] = nan
    logits[2, :300] = nan
    logits[2, 301:] = -inf
    logits[3, 99] = inf
    logits[4] = -inf
    logits[4, 500] = -1e30
    _, token_ids = draw(logits, *rows([temperature] * 5), 1000)
    assert token_ids.tolist() == [1000, 1000, 1300, 1099, 1500]


@pytest.mark.parametrize("draw", IMPLEMENTATIONS)
def test_padding_columns_are_never_drawn(draw):
    logits = random_logits(8, 640)
    logits[:, 517:] = 100.0
    temperatures = [0.0, 5.0] * 4
    for actual, expected in zip(
        draw(logits, *rows(temperatures), num_valid=517),
        draw(logits[:, :517].contiguous(), *rows(temperatures)),
        strict=True,
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("draw", IMPLEMENTATIONS)
def test_vocabulary_shards_merge_to_the_same_draw(draw):
    logits, inputs = random_logits(6, 1000), rows([0.0, 0.3, 0.7, 1.0, 1.5, 10.0])
    _, expected = draw(logits, *inputs)
    left, right = (draw(logits[:, s : s + 500], *inputs, vocab_start=s) for s in (0, 500))
    merged = torch.where(right[0] > left[0], right[1], left[1])
    assert torch.equal(merged, expected)


@pytest.mark.parametrize("draw", IMPLEMENTATIONS)
def test_ids_can_go_into_a_strided_column(draw):
    logits, inputs = random_logits(3, 517), rows([0.0, 1.0, 1.0])
    matrix = torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE)
    _, token_ids = draw(logits, *inputs, out=matrix[:, 1])
    assert token_ids.data_ptr() == matrix[:, 1].data_ptr()
    assert torch.equal(matrix[:, 1], draw(logits, *inputs)[1])
    assert (matrix[:, [0, 2, 3]] == -1).all()


@pytest.mark.parametrize("draw", [sample, *IMPLEMENTATIONS])
def test_empty_batch(draw):
    values, token_ids = draw(random_logits(0, 517), *rows([]))
    assert values.shape == token_ids.shape == (0,)


@pytest.mark.parametrize("draw", IMPLEMENTATIONS)
def test_a_draw_does_not_depend_on_the_other_rows(draw):
    logits, inputs = random_logits(6, 517), rows([0.0, 0.5, 1.0, 1.0, 1.0, 2.0])
    _, expected = draw(logits, *inputs)
    order = [4, 1, 5]
    _, token_ids = draw(logits[order], *(column[order] for column in inputs))
    assert token_ids.tolist() == expected[order].tolist()


def assert_same_draws(logits: torch.Tensor, inputs: list[torch.Tensor], **options: int) -> None:
    """Equal tokens; scores differ by 2**-11, what the kernel's exponentials are off by, at most."""
    values, token_ids = sample_triton(logits, *inputs, **options)
    expected_values, expected_ids = sample_reference(logits, *inputs)
    # On a GPU two scores that are closer than that may change places.
    num_swaps = 1 if DEVICE == "cuda" else 0
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=2**-11)
    assert (token_ids != expected_ids).sum() <= num_swaps


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 517, 5000])
def test_triton_draws_like_the_reference(dtype, vocab_size):
    logits = random_logits(8, vocab_size + 3, dtype)[:, 1 : vocab_size + 1]
    inputs = rows([0.0, 0.01, 0.3, 0.6, 0.7, 1.0, 1.5, 20.0])
    assert_same_draws(logits, inputs)
    assert_same_draws(logits, inputs, chunk_size=1024)


@needs_triton
def test_triton_draws_like_the_reference_over_a_whole_vocabulary():
    assert_same_draws(random_logits(3, 151_936, torch.bfloat16), rows([0.0, 0.6, 1.0]))
