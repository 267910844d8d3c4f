"""The memory check of the interpreter, which stands in for compute-sanitizer, sees what it must."""

import pytest
import torch

from nanovllm.kernels._triton import HAS_TRITON, tl, triton

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's; a GPU has a tool"),
]


@triton.jit
def _copy_kernel(x, out, num, IS_MASKED: tl.constexpr, IS_SUM: tl.constexpr):
    lanes = tl.arange(0, 8)
    if IS_MASKED:
        values = tl.load(x + lanes, mask=lanes < num, other=0.0)
    else:
        values = tl.load(x + lanes)
    if IS_SUM:
        tl.atomic_add(out + lanes, values)
    else:
        tl.store(out + lanes, values)


@pytest.mark.parametrize("is_sum", [False, True])
def test_what_lies_in_the_tensors_is_read_and_written(is_sum):
    x, out = torch.arange(5.0), torch.zeros(8)
    _copy_kernel[(1,)](x, out, 5, IS_MASKED=True, IS_SUM=is_sum)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("num_in", "num_out", "is_masked", "is_sum"),
    [(7, 8, False, False), (7, 8, True, False), (8, 7, True, False), (8, 7, True, True)],
)
def test_one_element_beyond_is_an_error(num_in, num_out, is_masked, is_sum):
    arguments = (torch.zeros(num_in), torch.zeros(num_out), 8)
    with pytest.raises(Exception, match="1 elements lie in no tensor"):
        _copy_kernel[(1,)](*arguments, IS_MASKED=is_masked, IS_SUM=is_sum)
