"""What of shared GPU memory can be looked at without two GPUs; tests/gpu has the rest."""

from __future__ import annotations

import logging

import torch
from torch._C import _distributed_c10d as c10d

from nanovllm.collectives import peer_memory
from nanovllm.collectives.peer_memory import (
    PeerMemory,
    RenumberedStore,
    make_peer_memory,
    slot_bytes_for,
)


def test_ranks_meet_whose_processes_have_made_different_numbers_of_exchanges(tmp_path):
    """A second engine's rank 0 once waited a minute for its worker, which counted from 0."""
    stores = [RenumberedStore(c10d.FileStore(str(tmp_path / "store"), 2)) for _ in range(2)]
    old, new = (c10d.PrefixStore("CUDASymmetricMemory", store) for store in stores)
    # As torch does it: through its own classes, a key is "name/number/rank".
    old.set("6/0", "of rank 0")
    new.set("0/1", "of rank 1")
    assert old.multi_get(["6/0", "6/1"]) == [b"of rank 0", b"of rank 1"]
    assert new.multi_get(["0/0", "0/1"]) == [b"of rank 0", b"of rank 1"]
    assert old.add("7", 1) == 1
    assert new.add("1", 1) == 2
    new.wait(["1"])


def test_gpus_that_do_not_reach_each_other_go_through_nccl_with_one_warning(
    tmp_path, monkeypatch, caplog
):
    arguments = (str(tmp_path / "store"), 0, 2, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    with caplog.at_level(logging.WARNING):
        assert make_peer_memory(*arguments) is None
    assert [record.getMessage() for record in caplog.records] == [
        "All collectives go through NCCL, which is slower for small messages: "
        "GPUs cannot write to each other's memory"
    ]
    caplog.clear()

    def fail(*_):
        raise RuntimeError("no handle")

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(peer_memory, "PeerMemory", fail)
    with caplog.at_level(logging.WARNING):
        assert make_peer_memory(*arguments) is None
    assert caplog.text.endswith("no handle\n") and len(caplog.records) == 1


def test_flags_behind_the_messages_of_any_number_of_ranks_are_aligned():
    """Of 3, 5, 6 or 7 ranks they were not, and all collectives went through NCCL."""
    for size in range(2, 9):
        num_bytes = 2 * size * slot_bytes_for(size)
        buffer = torch.empty(num_bytes + 64, dtype=torch.uint8)
        assert buffer[num_bytes:].view(torch.int64).numel() == 8
        assert slot_bytes_for(size) * size > 15 * 2**20


def test_messages_that_tell_nothing_go_another_way():
    peers = PeerMemory.__new__(PeerMemory)
    peers.max_bytes = 256
    assert [peers.takes(torch.zeros(n)) for n in (0, 1, 64, 65)] == [False, True, True, False]
    assert not peers.takes(torch.zeros(4, 4).t())
