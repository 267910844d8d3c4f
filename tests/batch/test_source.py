"""Lines from plain, gzip and zstd files and from pipes that give nothing."""

import gzip
import os
import threading
import time

import pytest

from nanovllm.batch import source as source_module
from nanovllm.batch.source import LineSource, count_lines

TEXT = 'erste "ü"\n\nlast'.encode()
LINES = [(1, 'erste "ü"\n'.encode()), (2, b"\n"), (3, b"last")]


def packed(kind, data):
    if kind == "gz":
        return gzip.compress(data[:5]) + gzip.compress(data[5:])
    if kind == "zst":
        zstandard = pytest.importorskip("zstandard", reason="needs pip install -e .[zstd]")
        compress = zstandard.ZstdCompressor().compress
        return compress(data[:5]) + compress(data[5:])
    return data


@pytest.mark.parametrize("kind", ["plain", "gz", "zst"])
def test_lines_have_their_numbers_whatever_the_packing(tmp_path, kind):
    path = tmp_path / "in"
    path.write_bytes(packed(kind, TEXT))
    source = LineSource(str(path), threading.Event())
    assert list(source) == LINES
    assert source.failure is None and source.fraction_read == 1.0 and not source.is_pipe
    source.close()
    assert count_lines(str(path), threading.Event()) == 2


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_cut_file_gives_what_it_has_and_says_so(tmp_path, kind):
    path = tmp_path / "in"
    lines = [b"%d %s\n" % (i, os.urandom(40).hex().encode()) for i in range(9999)]
    data = packed(kind, b"".join(lines))
    path.write_bytes(data[: len(data) * 2 // 3])
    source = LineSource(str(path), threading.Event())
    found = [line for _, line in source]
    assert "cannot be read after line" in source.failure
    assert 0 < len(found) < 9999 and found == lines[: len(found)], "and no half line"
    source.close()


def test_a_line_too_long_to_hold_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in"
    path.write_bytes(b"short\n" + b"x" * 95 + b"\nafter\n" + b"y" * 9 + b"\n")
    source = LineSource(str(path), threading.Event())
    assert list(source) == [(1, b"short\n"), (2, None), (3, b"after\n"), (4, b"y" * 9 + b"\n")]
    source.close()


def test_a_silent_pipe_ends_when_told(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    stop = threading.Event()
    writer = os.open(fifo, os.O_RDWR)
    os.write(writer, b"one\n")
    threading.Timer(0.5, stop.set).start()
    started = time.monotonic()
    # `peek` looks at the first bytes, so the pipe has to give some before the source is there.
    source = LineSource(str(fifo), stop)
    assert source.is_pipe and [line for _, line in source] == [b"one\n"]
    assert time.monotonic() - started < 5
    source.close()
    os.close(writer)
