"""What the scripts beside this file ask of a machine."""

import sys

import torch


def need_gpus(count: int = 1) -> None:
    """End the script, with exit code 2, where torch sees fewer CUDA GPUs."""
    seen = torch.cuda.device_count()
    if seen < count:
        print(f"needs {count} CUDA GPU{'s' * (count > 1)}, torch sees {seen}", file=sys.stderr)
        sys.exit(2)
