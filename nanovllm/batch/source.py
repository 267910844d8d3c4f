"""Lines of a file, a pipe, or a gzip or zstd stream, read as they are needed."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import select
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

MAX_LINE_BYTES = 64 << 20
_POLL_S = 0.2
_BUFFER_BYTES = 1 << 20
_ZSTD_READ_BYTES = 1 << 16  # a frame may unpack to many times that
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class LineSource:
    """Owns the input. `stop` ends it, even where a pipe gives nothing."""

    def __init__(self, path: str, stop: Event) -> None:
        self.is_pipe = not is_regular_file(path)
        self.failure: str | None = None  # why the input ended early
        self._stop = stop
        self._raw = _RawInput(path, stop)
        self._size = 0 if self._raw.is_pipe else os.fstat(self._raw.fileno()).st_size
        self._lines = _decompressed(io.BufferedReader(self._raw, _BUFFER_BYTES))

    @property
    def fraction_read(self) -> float | None:
        """How much of the file has been read; None for a pipe."""
        return self._raw.num_bytes / self._size if self._size else None

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (line number from 1, line); None in place of a line that is too long to hold."""
        number = 0
        try:
            while line := self._lines.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
                    yield number, line
                else:
                    while line and not line.endswith(b"\n"):
                        line = self._lines.readline(MAX_LINE_BYTES)
                    yield number, None
        except Exception as error:
            if not _is_damage(error):
                raise
            if not self._stop.is_set():
                self.failure = f"the input cannot be read after line {number}: {error}"

    def close(self) -> None:
        # Closing what is read in another thread, or stdin, may raise; nothing is lost by it.
        with contextlib.suppress(OSError, ValueError):
            self._lines.close()
            self._raw.close()


def is_regular_file(path: str) -> bool:
    """Whether a path can be read twice; standard input never counts as one."""
    return path != "-" and Path(path).is_file()


def count_lines(path: str, stop: Event) -> int | None:
    """How many lines that are not empty a file has, in one pass; None: stopped, or damaged."""
    count, last = 0, b"\n"
    source = _decompressed(io.BufferedReader(_RawInput(path, stop), _BUFFER_BYTES))
    with contextlib.closing(source):
        try:
            while block := source.read(_BUFFER_BYTES):
                joined = last + block
                count += block.count(b"\n") - joined.count(b"\n\n")
                last = block[-1:]
        except Exception as error:
            if not _is_damage(error):
                raise
            return None
    return None if stop.is_set() else count + (last != b"\n")


class _RawInput(io.RawIOBase):
    """A file or standard input, whose reads end when `stop` is set."""

    def __init__(self, path: str, stop: Event) -> None:
        super().__init__()
        self._fd = os.dup(0) if path == "-" else os.open(path, os.O_RDONLY)
        self._stop = stop
        self.is_pipe = not stat.S_ISREG(os.fstat(self._fd).st_mode)
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def readinto(self, buffer: Any) -> int:
        while not self._stop.is_set():
            if not self.is_pipe or select.select([self._fd], [], [], _POLL_S)[0]:
                num_read = os.readv(self._fd, [buffer])
                self.num_bytes += num_read
                return num_read
        return 0

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


class _ZstdInput(io.RawIOBase):
    """zstd frames, decompressed. The package's own reader takes a cut file for a whole one."""

    def __init__(self, packed: io.BufferedReader, decompressor: Any) -> None:
        super().__init__()
        self._packed = packed
        self._decompressor = decompressor
        self._frame: Any = None
        self._ahead = b""  # packed, of the next frame
        self._data = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            packed = self._ahead or self._packed.read1(_ZSTD_READ_BYTES)
            self._ahead = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._data = self._frame.decompress(packed)
            if self._frame.eof:
                self._ahead, self._frame = self._frame.unused_data, None
        num_bytes = min(len(buffer), len(self._data))
        buffer[:num_bytes], self._data = self._data[:num_bytes], self._data[num_bytes:]
        return num_bytes


def _decompressed(buffered: io.BufferedReader) -> io.BufferedIOBase:
    head = buffered.peek(4)[:4]
    if head.startswith(_GZIP):
        # Not in a BufferedReader: where the file is cut that loses the last whole lines.
        return gzip.GzipFile(fileobj=buffered)
    if head.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(
                "zstd input needs zstandard. Run `pip install -e '.[zstd]'`, or pipe it in: "
                "`zstdcat FILE | nanovllm run-batch -i - ...`."
            ) from error
        return io.BufferedReader(_ZstdInput(buffered, zstandard.ZstdDecompressor()), _BUFFER_BYTES)
    return buffered


def _is_damage(error: Exception) -> bool:
    # zstandard's own error is known by its name, since the package may be missing.
    return isinstance(error, (EOFError, OSError, zlib.error)) or type(error).__name__ == "ZstdError"
