"""Uploads that the device has not come to yet keep what they were given."""

import numpy as np
import torch

from nanovllm.engine.model_inputs import Uploader


def test_more_uploads_than_buffers_wait_for_a_device_that_lags_behind():
    """As steps do that a fault leaves in flight; indices of a later step once could land here."""
    uploader = Uploader(torch.device("cuda"))
    uploader.upload([np.zeros(4000, dtype=np.int32)])
    torch.cuda._sleep(100_000_000)  # some 50 ms
    given = [np.full(4000, number, dtype=np.int32) for number in range(1, 9)]
    tensors = [uploader.upload([array])[0] for array in given]
    assert [int(tensor.float().mean()) for tensor in tensors] == list(range(1, 9))
