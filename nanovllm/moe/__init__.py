"""Mixtures of experts: the feed-forward layer of sparse models, and its kernels.

`routing` chooses experts for each token, `plan` sorts (token, expert) pairs by expert, and
`grouped_gemm` multiplies each pair's row with its expert's weights. All counts stay on the device,
so that a decode step with such layers is captured as a CUDA graph like any other.
"""
