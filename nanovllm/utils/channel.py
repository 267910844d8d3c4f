"""One sender, many receivers: step records through shared memory, woken over private sockets.

The memory has no name that could collide, be guessed or be left behind: it is an anonymous file
whose descriptor is handed to the workers, and it is gone when the last process that maps it is.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection

_SLOTS = 4  # messages on their way; the engine has two steps in flight at most
_FIRST_SLOT_BYTES = 1 << 20
_HEADER = struct.Struct("<q")  # a receiver's count of messages read, one cache line each
_LINE = 64
_DOORBELL = struct.Struct("<qq")  # message number, length; a negative length announces new memory


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("nanovllm", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)  # /proc shows it to the user's own processes; to nobody else's
        return fd
    with tempfile.TemporaryFile() as file:  # already unlinked, readable by this user only
        return os.dup(file.fileno())


class ChannelSender:
    """Owns the shared memory; hands every message to all receivers, in order."""

    def __init__(self, connections: list[Connection], pids: list[int]) -> None:
        self._connections = connections
        self._pids = pids
        self._num_sent = 0
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0

    def send(self, message: bytes, check_alive: Callable[[], None]) -> None:
        """Send to every receiver; `check_alive` is called while waiting and may raise."""
        if self._memory is None or len(message) > self._slot_bytes:
            self._grow(len(message), check_alive)
        assert self._memory is not None
        self._wait_until_read(self._num_sent - _SLOTS + 1, check_alive)
        slot = self._num_sent % _SLOTS
        start = self._data_start() + slot * self._slot_bytes
        self._memory[start : start + len(message)] = message
        for connection in self._connections:
            connection.send_bytes(_DOORBELL.pack(self._num_sent, len(message)))
        self._num_sent += 1

    def close(self) -> None:
        """Unmap the memory. A second call does nothing."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _grow(self, num_bytes: int, check_alive: Callable[[], None]) -> None:
        self._wait_until_read(self._num_sent, check_alive)
        self.close()
        self._slot_bytes = max(_FIRST_SLOT_BYTES, 2 * num_bytes)
        size = self._data_start() + _SLOTS * self._slot_bytes
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
            for place in range(len(self._connections)):
                _HEADER.pack_into(self._memory, place * _LINE, self._num_sent)
            for connection, pid in zip(self._connections, self._pids, strict=True):
                connection.send_bytes(_DOORBELL.pack(self._slot_bytes, -size))
                reduction.send_handle(connection, fd, pid)
        finally:
            os.close(fd)

    def _wait_until_read(self, num_messages: int, check_alive: Callable[[], None]) -> None:
        """Wait until each receiver has read the first `num_messages` messages."""
        if self._memory is None:
            return
        for place in range(len(self._connections)):
            delay = 1e-5
            while _HEADER.unpack_from(self._memory, place * _LINE)[0] < num_messages:
                check_alive()
                time.sleep(delay)
                delay = min(2 * delay, 1e-2)

    def _data_start(self) -> int:
        return len(self._connections) * _LINE


class ChannelReceiver:
    """One receiver's end. `place` is its number among the receivers."""

    def __init__(self, connection: Connection, place: int, num_receivers: int) -> None:
        self._connection = connection
        self._place = place
        self._data_start = num_receivers * _LINE
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0

    def receive(self) -> bytes:
        """Block for the next message. EOFError when the sender is gone, however it ended."""
        number, length = _DOORBELL.unpack(self._connection.recv_bytes())
        while length < 0:
            self._map(slot_bytes=number, size=-length)
            number, length = _DOORBELL.unpack(self._connection.recv_bytes())
        assert self._memory is not None, "memory is announced before the first message"
        start = self._data_start + number % _SLOTS * self._slot_bytes
        message = self._memory[start : start + length]
        _HEADER.pack_into(self._memory, self._place * _LINE, number + 1)
        return message

    def close(self) -> None:
        """Unmap the memory. A second call does nothing."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _map(self, *, slot_bytes: int, size: int) -> None:
        self.close()
        fd = reduction.recv_handle(self._connection)
        try:
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._slot_bytes = slot_bytes
