"""Messages through shared memory, between real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import zlib
from pathlib import Path

import pytest

from nanovllm.utils.channel import ChannelReceiver, ChannelSender

# Receivers are forked off a process that has imported what they need, for 2 s less each than spawn.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["nanovllm.utils.channel"])
TIMEOUT_S = 60.0


def echo(connection, place, num_receivers, replies, slow_s):
    """Send each message's length and checksum back until the sender is gone."""
    receiver = ChannelReceiver(connection, place, num_receivers)
    replies.send("up")
    try:
        while True:
            message = receiver.receive()
            time.sleep(slow_s)
            replies.send((len(message), zlib.crc32(message)))
    except EOFError:
        replies.send("sender gone")
    receiver.close()
    receiver.close()


class Group:
    """A sender here and receivers in processes of their own."""

    def __init__(self, num_receivers: int, slow_s: float = 0.0) -> None:
        self.connections, self.replies, self.processes = [], [], []
        for place in range(num_receivers):
            ours, theirs = CONTEXT.Pipe()
            replies, worker_replies = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=echo,
                args=(theirs, place, num_receivers, worker_replies, slow_s),
                daemon=True,
            )
            process.start()
            theirs.close()
            worker_replies.close()
            self.connections.append(ours)
            self.replies.append(replies)
            self.processes.append(process)
        for replies in self.replies:
            assert self.reply(replies) == "up"
        pids = [process.pid for process in self.processes]
        self.sender = ChannelSender(self.connections, pids)

    def send(self, message: bytes) -> None:
        self.sender.send(message, self.check_alive)

    def check_alive(self) -> None:
        for process in self.processes:
            if not process.is_alive():
                raise RuntimeError(f"receiver ended with {process.exitcode}")

    def reply(self, replies):
        assert replies.poll(TIMEOUT_S), "no answer"
        return replies.recv()

    def end(self) -> None:
        self.sender.close()
        self.sender.close()
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(TIMEOUT_S)
            assert not process.is_alive()


@pytest.fixture
def make_group():
    groups = []

    def make(*args, **options):
        groups.append(Group(*args, **options))
        return groups[-1]

    yield make
    for group in groups:
        for process in group.processes:
            if process.is_alive():
                process.kill()
            process.join()


def message_of(num_bytes: int, seed: int = 0) -> bytes:
    return bytes([seed % 251]) * (num_bytes // 2) + bytes([(seed + 1) % 251]) * (
        num_bytes - num_bytes // 2
    )


def test_messages_of_all_sizes_arrive_whole_and_in_order_at_every_receiver(make_group):
    group = make_group(2)
    sizes = [0, 1, 64, 1000, 2**20, 2**20 + 1, 5, 3 * 2**20, 100 * 10**6, 7, 2**20]
    sent = []
    for seed, size in enumerate(sizes):
        message = message_of(size, seed)
        sent.append((size, zlib.crc32(message)))
        group.send(message)
    for replies in group.replies:
        assert [group.reply(replies) for _ in sizes] == sent
    group.end()
    for replies in group.replies:
        assert group.reply(replies) == "sender gone"


def test_messages_at_the_edges_of_a_slot_arrive_whole(make_group):
    """Memory grows to twice a message that does not fit: one byte below, at and above each size."""
    group = make_group(1)
    slot, sizes = 2**20, []
    for _ in range(2):
        sizes += [slot - 1, slot, slot + 1, 0, 2 * slot + 2, 2 * slot + 1]
        slot = 2 * (2 * slot + 2)
    sent = []
    for seed, size in enumerate(sizes):
        message = message_of(size, seed)
        sent.append((size, zlib.crc32(message)))
        group.send(message)
        for replies in group.replies:
            assert group.reply(replies) == sent[-1]
    group.end()


def test_a_sender_waits_for_the_slowest_receiver_and_overwrites_nothing(make_group):
    group = make_group(1, slow_s=0.01)
    messages = [message_of(1000 + i, i) for i in range(40)]
    for message in messages:
        group.send(message)
    got = [group.reply(group.replies[0]) for _ in messages]
    assert got == [(len(message), zlib.crc32(message)) for message in messages]
    group.end()


def test_many_small_messages_are_fast(make_group):
    group = make_group(1)
    started = time.perf_counter()
    for i in range(2000):
        group.send(b"%d" % i)
        assert group.reply(group.replies[0])[0] == len(str(i))
    # Far above what it takes, far below a sleep of 10 ms each.
    assert time.perf_counter() - started < 10
    group.end()


def test_a_receiver_that_was_killed_makes_the_sender_raise(make_group):
    group = make_group(2)
    group.send(b"first")
    for replies in group.replies:
        group.reply(replies)
    os.kill(group.processes[0].pid, signal.SIGKILL)
    group.processes[0].join(TIMEOUT_S)
    started = time.perf_counter()
    with pytest.raises((RuntimeError, OSError)):
        for _ in range(10):
            group.send(b"second")
    assert time.perf_counter() - started < 5


def test_a_receiver_that_dies_while_the_sender_waits_is_noticed(make_group):
    group = make_group(1, slow_s=3.0)
    for _ in range(3):
        group.send(b"slow")
    os.kill(group.processes[0].pid, signal.SIGKILL)
    with pytest.raises((RuntimeError, OSError)):
        for _ in range(10):
            group.send(b"more")


def test_receivers_see_the_end_when_the_sender_closes(make_group):
    group = make_group(1)
    group.send(b"one")
    assert group.reply(group.replies[0])[0] == 3
    group.end()
    assert group.reply(group.replies[0]) == "sender gone"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_the_memory_has_no_name(make_group):
    """Nothing to collide with, to guess, or to leave behind after kill -9."""
    group = make_group(1)
    group.send(message_of(2**21))
    group.reply(group.replies[0])
    assert [name for name in os.listdir("/dev/shm") if "nanovllm" in name] == []
    assert "memfd:nanovllm (deleted)" in Path("/proc/self/maps").read_text()
    group.end()
    assert "memfd:nanovllm" not in Path("/proc/self/maps").read_text()
