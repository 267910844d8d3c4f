"""What Triton's interpreter gets wrong is put right here too."""

from kernels.conftest import casts_to_fp8_are_exact  # noqa: F401  # a fixture for all tests
