"""The exchange kernel against its torch reference: one rank's part, with the others' written."""

from __future__ import annotations

import pytest
import torch

from nanovllm.collectives.exchange import FLAG_WIDTH, Inboxes, exchange, exchange_reference
from nanovllm.kernels._triton import HAS_TRITON, tl

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_PROGRAMS = 3
SLOT_BYTES = 1 << 17


def make_inboxes(num_ranks: int) -> list[Inboxes]:
    """The memory of all ranks, here on one device."""
    data_bytes = 2 * num_ranks * SLOT_BYTES
    flag_bytes = 8 * num_ranks * NUM_PROGRAMS * FLAG_WIDTH
    shape = (num_ranks, data_bytes + flag_bytes)
    # Of one tensor: the checks of the interpreter's accesses know what is passed to a kernel.
    buffers = list(torch.zeros(shape, dtype=torch.uint8, device=DEVICE))
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    return [
        Inboxes(
            data=buffer[:data_bytes].view(2, num_ranks, SLOT_BYTES),
            flags=buffer[data_bytes:].view(torch.int64).view(num_ranks, NUM_PROGRAMS, FLAG_WIDTH),
            epochs=torch.zeros(NUM_PROGRAMS, dtype=torch.int64, device=DEVICE),
            offsets=(addresses - addresses[rank]).to(DEVICE),
            stop=stop,
            rank=rank,
        )
        for rank, buffer in enumerate(buffers)
    ]


def pretend_sent(inboxes: Inboxes, sender: int, part: torch.Tensor, epoch: int) -> None:
    """Do what the kernel of `sender` would have done to this rank's inbox."""
    place = inboxes.data[epoch % 2, sender].view(part.dtype)
    place[: part.numel()] = part.flatten()
    inboxes.flags[sender] = epoch


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_and_what_others_are_sent(num_ranks, dtype):
    """More elements than one round of the programs, a number that does not divide, and few."""
    torch.manual_seed(0)
    for rank in (0, num_ranks - 1):
        inboxes = make_inboxes(num_ranks)
        mine = inboxes[rank]
        for epoch, shape in enumerate([(9, 1501), (1, 8), (5, 4096), (1, 1)], start=1):
            # Whole numbers: Triton's interpreter cuts bfloat16 where it should round.
            parts = [
                torch.randint(-30, 30, shape, device=DEVICE).to(dtype) for _ in range(num_ranks)
            ]
            for sender in range(num_ranks):
                if sender != rank:
                    pretend_sent(mine, sender, parts[sender], epoch)
            x = parts[rank].clone()
            exchange(x, x, mine, is_sum=True)
            assert torch.equal(x, exchange_reference(parts, is_sum=True))
            num_active = min(NUM_PROGRAMS, -(-x.numel() // 4096))
            for other, theirs in enumerate(inboxes):
                if other != rank:
                    sent = theirs.data[epoch % 2, rank].view(dtype)[: x.numel()].view(shape)
                    assert torch.equal(sent, parts[rank])
                    assert theirs.flags[rank, :num_active, 0].tolist() == [epoch] * num_active
            assert mine.epochs.tolist() == [epoch] * NUM_PROGRAMS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.int64], ids=str)
def test_gathers_in_rank_order(dtype):
    for rank in range(3):
        inboxes = make_inboxes(3)
        mine = inboxes[rank]
        parts = [torch.arange(14, device=DEVICE).view(2, 7).to(dtype) + 100 * r for r in range(3)]
        for sender in range(3):
            if sender != rank:
                pretend_sent(mine, sender, parts[sender], epoch=1)
        out = torch.zeros(3, 2, 7, dtype=dtype, device=DEVICE)
        exchange(parts[rank], out, mine, is_sum=False)
        assert torch.equal(out, exchange_reference(parts, is_sum=False))


def test_a_rank_that_is_gone_is_not_waited_for_once_the_host_says_stop(monkeypatch):
    if DEVICE == "cpu":  # the interpreter looks slowly
        monkeypatch.setattr("nanovllm.collectives.exchange._SPINS", tl.constexpr(16))
    mine, _theirs = make_inboxes(2)
    mine.stop.fill_(1)
    x = torch.ones(8, device=DEVICE)
    exchange(x, x, mine, is_sum=True)  # once, this never came back
    assert mine.epochs.tolist() == [1] * NUM_PROGRAMS
