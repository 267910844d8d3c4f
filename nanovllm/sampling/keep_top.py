"""Drop what min_p, top_k and top_p leave out, without sorting the vocabulary."""

import math

import torch

from nanovllm.kernels._triton import tl, triton, use_triton
from nanovllm.sampling_params import GREEDY_TEMPERATURE

# Likely tokens of a row that are gathered, so that a search reads them and not the vocabulary.
_MAX_CANDIDATES = 2048
_NUCLEUS = 1024  # about how many of them where no top_k says

_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)
_LOG2_E = tl.constexpr(math.log2(math.e))


def keep_top(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """Set the logits that the filters leave out to -inf, in place; each row keeps one at least.

    The filters look at `logits / temperature`, one after another: min_p keeps tokens at least
    `min_p` times as likely as the likeliest; top_k keeps the `top_k` likeliest and all that tie
    with the last of them; top_p keeps the likeliest of what is left until their probability
    reaches `top_p`, and among ties on its edge those with the highest ids, which is what a stable
    ascending sort gives. The logits themselves stay undivided.

    Args:
        logits: [n, vocab_size] float32, last dim contiguous
        temperatures: [n] float32; below GREEDY_TEMPERATURE it counts as 1
        min_p, top_p: [n] float32, 0 and 1 are off
        top_k: [n] int32, off where 0 or not below vocab_size; all columns may be strided
    """
    implementation = keep_top_triton if use_triton(logits) else keep_top_reference
    implementation(logits, temperatures, min_p, top_k, top_p)


def keep_top_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """Plain torch form of `keep_top`, which sorts."""
    logits.masked_fill_(logits.isnan(), float("-inf"))
    vocab_size = logits.shape[1]
    is_greedy = temperatures < GREEDY_TEMPERATURE
    scaled = logits.double() / torch.where(is_greedy, 1.0, temperatures).unsqueeze(1)
    floor = scaled.amax(dim=1) + min_p.double().log()
    scaled.masked_fill_(scaled < floor.unsqueeze(1), float("-inf"))
    values, order = scaled.sort(dim=1, stable=True)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    places = torch.where(has_top_k, vocab_size - top_k, 0).long()
    edge = values.gather(1, places.unsqueeze(1))
    values.masked_fill_(values < edge, float("-inf"))
    # inf - inf is NaN: an infinite logit is as likely as its equals, and leaves nothing to others.
    below = torch.where(values == values[:, -1:], 0.0, values - values[:, -1:])
    # A token goes if it and all less likely ones together are no more than what top_p leaves out.
    is_dropped = below.softmax(dim=1).cumsum(dim=1) <= 1 - top_p.double().unsqueeze(1)
    is_dropped &= (top_p < 1).unsqueeze(1)
    is_dropped[:, -1] = False
    is_dropped |= values == float("-inf")
    logits.masked_fill_(is_dropped.scatter(1, order, is_dropped), float("-inf"))


def keep_top_triton(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    block: int = 4096,
    num_warps: int = 16,
    max_candidates: int = _MAX_CANDIDATES,
) -> None:
    """Triton form of `keep_top`: one program a row, which narrows each edge down pass by pass.

    block (tokens a step), num_warps and max_candidates change speed alone.
    """
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1, "rows must be contiguous"
    if n == 0:
        return
    candidates = torch.empty((n, max_candidates), dtype=torch.float32, device=logits.device)
    _keep_top_kernel[(n,)](
        logits,
        candidates,
        temperatures,
        min_p,
        top_k,
        top_p,
        logits.stride(0),
        temperatures.stride(0),
        min_p.stride(0),
        top_k.stride(0),
        top_p.stride(0),
        vocab_size,
        MAX_CANDIDATES=max_candidates,
        NUCLEUS=min(_NUCLEUS, max_candidates // 2),
        BLOCK=min(block, triton.next_power_of_2(vocab_size)),
        num_warps=num_warps,
    )


@triton.jit
def _keep_top_kernel(
    logits,
    candidates,
    temperatures,
    min_p_column,
    top_k_column,
    top_p_column,
    logits_stride,
    temperatures_stride,
    min_p_stride,
    top_k_stride,
    top_p_stride,
    size,
    MAX_CANDIDATES: tl.constexpr,
    NUCLEUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * logits_stride
    temperature = tl.load(temperatures + row * temperatures_stride)
    min_p = tl.load(min_p_column + row * min_p_stride)
    top_k = tl.load(top_k_column + row * top_k_stride)
    top_p = tl.load(top_p_column + row * top_p_stride)
    has_top_k = (top_k > 0) & (top_k < size)
    if (min_p > 0) | has_top_k | (top_p < 1):
        if temperature < _GREEDY_TEMPERATURE:
            temperature = 1.0
        scale = _LOG2_E / temperature  # probabilities are powers of 2 of (logit - largest) * scale
        lanes = tl.arange(0, BLOCK)

        lane_max = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, size, BLOCK):
            lane_max = tl.maximum(lane_max, _load(base, start + lanes, size))
        largest = tl.max(lane_max, axis=0)
        max_key = _key(largest)
        # -inf is never a candidate: its key lies below.
        floor = _key(float("-inf")) + 1
        if min_p > 0:
            # Adding 0 makes -0 a 0, whose key is the one that it equals.
            floor = tl.maximum(floor, _key(largest + tl.log2(min_p) / scale + 0.0))
        # Where the edges are searched: in all of the row, or in its likely tokens alone.
        source = base
        num_sources = size
        total = 0.0
        if has_top_k | (top_p < 1):
            num_wanted = tl.where(has_top_k, tl.minimum(top_k, NUCLEUS), NUCLEUS)
            # As many lanes reach it, so at least as many tokens do, and mostly few more.
            low = tl.maximum(_low_key(_key(lane_max), num_wanted, max_key), floor)
            lane_counts, total, mass = _lane_counts(base, size, low, floor, largest, scale, BLOCK)
            count = tl.sum(lane_counts, axis=0)
            has_edges = tl.where(has_top_k, count >= top_k, mass >= total * top_p) | (low == floor)
            if has_edges & (count <= MAX_CANDIDATES):
                source = candidates + row * MAX_CANDIDATES
                num_sources = count
                floor = low  # both edges are at it or above
                _gather(base, size, low, lane_counts, source, BLOCK)
        if has_top_k:
            count, _, _ = _weights(
                source, num_sources, floor, floor, floor, largest, scale, False, BLOCK
            )
            if count > top_k:
                floor = _edge(
                    source, num_sources, floor, max_key, top_k.to(tl.float32), largest, scale,
                    False, BLOCK,
                )  # fmt: skip
        num_ties = 0
        num_kept_ties = 0
        if top_p < 1:
            if has_top_k:
                total, _, _ = _weights(
                    source, num_sources, floor, floor, floor, largest, scale, True, BLOCK
                )
            target = total * top_p
            floor = _edge(source, num_sources, floor, max_key, target, largest, scale, True, BLOCK)
            after, _, _ = _weights(
                source, num_sources, floor + 1, floor + 1, floor + 1, largest, scale, True, BLOCK
            )
            at, above, _ = _weights(
                source, num_sources, floor, floor + 1, floor + 1, largest, scale, False, BLOCK
            )
            num_ties = (at - above).to(tl.int32)
            one_tie = _mass(_value(floor), largest, scale)
            missing = tl.ceil((target - after) / one_tie)
            # Clamped as a float: `one_tie` may be tiny.
            missing = tl.minimum(tl.maximum(missing, 1.0), num_ties.to(tl.float32))
            num_kept_ties = missing.to(tl.int32)

        if num_kept_ties == num_ties:
            for start in tl.range(0, size, BLOCK):
                ids = start + lanes
                is_dropped = _key(_load(base, ids, size)) < floor
                tl.store(base + ids, float("-inf"), mask=is_dropped & (ids < size))
        else:
            # From the end, since the highest ids among the ties stay.
            num_seen = 0
            for start in tl.range(0, size, BLOCK):
                ids = (tl.cdiv(size, BLOCK) - 1) * BLOCK - start + lanes
                keys = _key(_load(base, ids, size))
                ties = ((keys == floor) & (ids < size)).to(tl.int32)
                places = num_seen + tl.cumsum(ties, axis=0, reverse=True)
                is_dropped = (keys < floor) | ((ties != 0) & (places > num_kept_ties))
                tl.store(base + ids, float("-inf"), mask=is_dropped & (ids < size))
                num_seen += tl.sum(ties, axis=0)


@triton.jit
def _low_key(lane_keys, num_wanted, max_key):
    """Return a key that at least `num_wanted` lanes reach, as few more as a search soon finds."""
    low = tl.full([], -(1 << 31), tl.int64)  # all lanes
    high = max_key.to(tl.int64) + 1  # none
    count = 1 << 30
    while (count > num_wanted + num_wanted // 8) & (high - low > 1):
        middle = (low + high) // 2
        count_here = tl.sum((lane_keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        if count_here >= num_wanted:
            low = middle
            count = count_here
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def _lane_counts(base, size, low, floor, largest, scale, BLOCK: tl.constexpr):
    """Return how many tokens of each lane reach `low`, and the mass above `floor` and `low`."""
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK):
        values = _load(base, start + lanes, size)
        keys = _key(values)
        weights = _mass(values, largest, scale)
        counts += (keys >= low).to(tl.int32)
        total += tl.where(keys >= floor, weights, 0.0)
        mass += tl.where(keys >= low, weights, 0.0)
    return counts, tl.sum(total, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _gather(base, size, low, lane_counts, target, BLOCK: tl.constexpr):
    """Store the values that reach `low` one after another, those of a lane together."""
    lanes = tl.arange(0, BLOCK)
    places = tl.cumsum(lane_counts, axis=0) - lane_counts
    for start in tl.range(0, size, BLOCK):
        values = _load(base, start + lanes, size)
        is_candidate = _key(values) >= low
        tl.store(target + places, values, mask=is_candidate)
        places += is_candidate.to(tl.int32)
    # Other threads of this program read them next.
    tl.debug_barrier()


@triton.jit
def _edge(
    base,
    size,
    low,
    max_key,
    target,
    largest,
    scale,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest key at or above which tokens weigh `target` in all.

    low: a key that has that property; `max_key` + 1 does not.
    """
    # The interval [low, high) always holds the answer. Keys far below the largest are unlikely:
    # the first pass looks at distances in logits, the others cut the keys between in five.
    low_key = low.to(tl.int64)
    high_key = max_key.to(tl.int64) + 1
    spread = 1.0 / scale
    first = tl.maximum(_key(largest - spread), low).to(tl.int64)
    second = tl.maximum(_key(largest - 4 * spread), low).to(tl.int64)
    third = tl.maximum(_key(largest - 10 * spread), low).to(tl.int64)
    while high_key - low_key > 1:
        a, b, c = _weights(
            base,
            size,
            first.to(tl.int32),
            second.to(tl.int32),
            third.to(tl.int32),
            largest,
            scale,
            BY_MASS,
            BLOCK,
        )
        # Keys fall from first to third, so weights rise.
        if a >= target:
            low_key = tl.maximum(low_key, first)
        else:
            high_key = tl.minimum(high_key, first)
            if b >= target:
                low_key = tl.maximum(low_key, second)
            else:
                high_key = tl.minimum(high_key, second)
                if c >= target:
                    low_key = tl.maximum(low_key, third)
                else:
                    high_key = tl.minimum(high_key, third)
        # `low` itself has the property whatever rounding says.
        high_key = tl.maximum(high_key, low_key + 1)
        part = (high_key - low_key + 3) // 4
        third = tl.minimum(low_key + part, high_key - 1)
        second = tl.minimum(low_key + 2 * part, high_key - 1)
        first = tl.minimum(low_key + 3 * part, high_key - 1)
    return low_key.to(tl.int32)


@triton.jit
def _weights(
    base,
    size,
    key_a,
    key_b,
    key_c,
    largest,
    scale,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weigh the tokens at or above each of three keys, by unnormalised probability or count."""
    lanes = tl.arange(0, BLOCK)
    # Counts are exact: below 2^24 a float32 holds every integer.
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK):
        values = _load(base, start + lanes, size)
        keys = _key(values)
        if BY_MASS:
            weights = _mass(values, largest, scale)
        else:
            weights = tl.where(values > float("-inf"), 1.0, 0.0)
        a += tl.where(keys >= key_a, weights, 0.0)
        b += tl.where(keys >= key_b, weights, 0.0)
        c += tl.where(keys >= key_c, weights, 0.0)
    return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)


@triton.jit
def _load(base, ids, size):
    values = tl.load(base + ids, mask=ids < size, other=float("-inf"))
    # NaN counts as never; adding 0 makes -0 a 0, so that equal values have equal keys.
    return tl.where(values == values, values, float("-inf")) + 0.0


@triton.jit
def _mass(values, largest, scale):
    # inf - inf is NaN: an infinite logit is the likeliest, and so are those equal to it.
    return tl.where(values == largest, 1.0, tl.exp2((values - largest) * scale))


@triton.jit
def _key(values):
    """Map float32 to int32 in the same order."""
    bits = tl.cast(values, tl.float32).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(keys):
    bits = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
