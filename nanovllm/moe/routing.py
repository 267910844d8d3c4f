"""Choose the experts of each token."""

import torch

from nanovllm.kernels._triton import pdl_options, pdl_wait, tl, triton, use_triton

_TOKENS_PER_PROGRAM = 4


def route(
    logits: torch.Tensor, top_k: int, *, is_normalized: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, [num_tokens, top_k] float32, and ids, int32, of each token's experts.

    The weights are a softmax over all experts, in float32; `is_normalized` makes those that were
    chosen sum up to 1. Of equal logits the lower id wins. NaN counts as the lowest logit, so that
    ids are valid whatever a padding row holds.

    Args:
        logits: [num_tokens, num_experts], or what `split_gemm` returns: float32 [num_splits,
            num_tokens, num_experts], to be added up
        dtype: the model's; sums of several shares are rounded to it, as one GEMM rounds
    """
    if use_triton(logits):
        return route_triton(logits, top_k, is_normalized=is_normalized, dtype=dtype)
    return route_reference(logits, top_k, is_normalized=is_normalized, dtype=dtype)


def route_reference(
    logits: torch.Tensor, top_k: int, *, is_normalized: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `route`."""
    if logits.dim() == 3:
        logits = logits.sum(dim=0).to(dtype)
    wide = logits.float().nan_to_num(torch.finfo(torch.float32).min)
    # Not topk, which takes either of equal ones.
    ordered, ids = wide.sort(dim=1, descending=True, stable=True)
    chosen = ordered[:, :top_k]
    total = (chosen if is_normalized else wide).logsumexp(dim=1, keepdim=True)
    return (chosen - total).exp(), ids[:, :top_k].int()


def route_triton(
    logits: torch.Tensor, top_k: int, *, is_normalized: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton form of `route`: one kernel, a few tokens a program."""
    num_tokens, num_experts = logits.shape[-2:]
    num_splits = logits.shape[0] if logits.dim() == 3 else 1
    assert logits.is_contiguous()
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    block = triton.next_power_of_2(num_experts)
    _route_kernel[(triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)](
        logits, weights, ids, torch.empty(1, dtype=dtype, device=logits.device), num_tokens,
        NUM_EXPERTS=num_experts, TOP_K=top_k, IS_NORMALIZED=is_normalized, NUM_SPLITS=num_splits,
        PLACES=triton.next_power_of_2(top_k), TOKENS=_TOKENS_PER_PROGRAM, BLOCK=block,
        num_warps=4, **pdl_options(logits),
    )  # fmt: skip
    return weights, ids


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits, weights, ids, like, num_tokens, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    IS_NORMALIZED: tl.constexpr, NUM_SPLITS: tl.constexpr, PLACES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    LOWEST: tl.constexpr = -3.4028234663852886e38
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, BLOCK)[None, :]
    is_expert = experts < NUM_EXPERTS
    mask = (tokens[:, None] < num_tokens) & is_expert
    source = logits + tokens[:, None].to(tl.int64) * NUM_EXPERTS + experts
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if NUM_SPLITS > 1:
        for split in tl.static_range(1, NUM_SPLITS):
            share = source + split * num_tokens.to(tl.int64) * NUM_EXPERTS
            values += tl.load(share, mask=mask, other=0.0)
        values = values.to(like.dtype.element_ty).to(tl.float32)
    values = tl.where(values == values, tl.maximum(values, LOWEST), LOWEST)
    values = tl.where(is_expert, values, float("-inf"))
    best = tl.max(values, axis=1)
    total = tl.sum(tl.exp(values - best[:, None]), axis=1)
    places = tl.arange(0, PLACES)[None, :]
    chosen = tl.full([TOKENS, PLACES], float("-inf"), tl.float32)
    chosen_ids = tl.zeros([TOKENS, PLACES], tl.int32)
    for place in tl.static_range(TOP_K):
        # Those that are taken are -inf, below every expert's value.
        value = tl.max(values, axis=1)
        is_best = values == value[:, None]
        expert = tl.min(tl.where(is_best, experts, BLOCK), axis=1)
        values = tl.where(experts == expert[:, None], float("-inf"), values)
        chosen = tl.where(places == place, value[:, None], chosen)
        chosen_ids = tl.where(places == place, expert[:, None], chosen_ids)
    exps = tl.exp(chosen - best[:, None])
    if IS_NORMALIZED:
        total = tl.sum(exps, axis=1)
    targets = tokens[:, None] * TOP_K + places
    is_stored = (tokens[:, None] < num_tokens) & (places < TOP_K)
    tl.store(weights + targets, exps / total[:, None], mask=is_stored)
    tl.store(ids + targets, chosen_ids, mask=is_stored)
