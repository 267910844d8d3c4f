"""Programs that tests start in a session of their own, and what is left of them afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OPTIONS = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 64}


def start(directory: Path, text: str, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """Run a script whose temporary files go to `directory`/tmp."""
    path = directory / "script.py"
    path.write_text(text)
    (directory / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(directory / "tmp"),
            "PYTHONPATH": str(ROOT),
        },
        start_new_session=True,
    )


def session_pids(session: int) -> list[int]:
    """The live processes of a session."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3] == str(session) and fields[0] != "Z":
            pids.append(int(path.parent.name))
    return pids


def wait_until_gone(session: int, timeout_s: float) -> None:
    """Wait until no process of a session lives, and fail if one still does."""
    deadline = time.monotonic() + timeout_s
    while pids := session_pids(session):
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in pids]
        assert time.monotonic() < deadline, lines
        time.sleep(0.02)


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def out_of_memory(*args: Any) -> None:
    """What a method is replaced by, here or in a worker, which imports it from here."""
    raise MemoryError(f"no memory for {len(args)} arguments")
