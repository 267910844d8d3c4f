"""Sparse layers on CUDA in bfloat16: as a loop over experts, and captured, whatever is routed."""

import pytest

from tests.gpu import bench_moe

pytestmark = pytest.mark.gpu


def test_layers_equal_a_loop_over_experts_and_follow_their_input_when_captured():
    bench_moe.check()


def test_layers_in_fp8_equal_torch_and_follow_their_input_when_captured():
    bench_moe.check_fp8()
