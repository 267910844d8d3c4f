"""The output file: whole lines, appended as requests finish, fit to go on with after a crash."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm.batch.done import IdSet, NumberSet
from nanovllm.batch.records import dump_line, record_digest, record_key

logger = logging.getLogger(__name__)

_ADVICE = "Choose another output, or pass --overwrite to start anew"
_READ_BYTES = 1 << 20


class RefusedOutput(ValueError):
    """The output file is another job's, damaged, or in use."""


def job_path_of(path: Path) -> Path:
    """The file that says which job wrote the output `path`."""
    return path.with_name(path.name + ".job.json")


class Journal:
    """Owns the output file, its lock and its `.job.json`, which says what job wrote it.

    Opening cuts a torn last line and reads which lines are finished. `append` may be called from
    any thread; what it has returned from survives the death of the process, and the death of the
    machine `fsync_interval_s` later.
    """

    def __init__(
        self,
        path: Path,
        job: dict[str, Any],
        *,
        fsync_interval_s: float = 5.0,
        overwrite: bool = False,
        force: bool = False,
        retry_failed: bool = False,
    ) -> None:
        self.path = path
        self.job_path = job_path_of(path)
        self.finished_ids = IdSet()
        self.finished_lines = NumberSet()  # of lines without custom_id
        self.error_lines = NumberSet()  # that have an error and no custom_id of their own
        self._failed = IdSet()  # keys whose last result is an error
        self._retry_failed = retry_failed
        self._digests = IdSet()  # of finished lines, with what they are known by
        self._checks_lines = not force
        self.num_ok = self.num_errors = 0  # last results in the file when it was opened
        self._fsync_interval_s = fsync_interval_s
        self._lock = threading.Lock()
        self._is_broken = False
        if path.exists() and not path.is_file():
            raise RefusedOutput(f"{path} is no file that a job could be gone on with.")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._take(job, overwrite=overwrite, force=force)
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise
        self._last_fsync = time.monotonic()

    @property
    def num_finished(self) -> int:
        """Lines of the input that the file answered when it was opened."""
        return self.num_ok + self.num_errors

    def append(self, record: dict[str, Any]) -> None:
        """Write one whole line. ValueError: the record is no JSON, and nothing was written."""
        data = dump_line(record)
        with self._lock:
            if self._fd < 0:
                raise OSError(f"{self.path} is closed.")
            # After a failed write the file may end in half a line, which must stay the last.
            if self._is_broken:
                raise OSError(f"{self.path}: an earlier write failed.")
            self._is_broken = True
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            if time.monotonic() - self._last_fsync >= self._fsync_interval_s:
                os.fsync(self._fd)
                self._last_fsync = time.monotonic()
            self._is_broken = False

    def close(self) -> None:
        """Bring everything to the disk and let go of the file. A second call does nothing."""
        with self._lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                with suppress(OSError):
                    os.fsync(fd)
                os.close(fd)

    def answers(self, key: str | int, digest: str) -> bool:
        """Whether the file's line for `key` is of an input line with this digest."""
        return _digest_key(key, digest) in self._digests or _digest_key(key, "") in self._digests

    def check_unchanged(self, key: str | int, digest: str, line_number: int) -> None:
        """Refuse to go on with the file if a line that it answers is another now."""
        if self._checks_lines and not self.answers(key, digest):
            answered = "answered it"
            if _digest_key(key, "failed") in self._failed:
                answered = "gave an error for it. Pass --retry-failed to run it as it is now"
            raise RefusedOutput(
                f"Line {line_number} of the input was changed since {self.path} {answered}. "
                f"Put it back, {_ADVICE[0].lower()}{_ADVICE[1:]}, or --force-resume to keep the "
                "answer to what it was."
            )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- opening

    def _take(self, job: dict[str, Any], *, overwrite: bool, force: bool) -> None:
        try:
            # Not lockf: its lock goes when any descriptor of the file is closed.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RefusedOutput(f"{self.path} is being written by another run-batch.") from error
        if overwrite:
            os.ftruncate(self._fd, 0)
        if os.fstat(self._fd).st_size:
            self._check_same_job(job, force=force)
            self._read_finished()
        # Before the first result: a crash must not leave results that nobody can attribute.
        if not self.num_finished or force or self._retry_failed:
            self._write_job(job)

    def _check_same_job(self, job: dict[str, Any], *, force: bool) -> None:
        try:
            written_by = json.loads(self.job_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            written_by = None
        except (ValueError, RecursionError) as error:
            raise RefusedOutput(f"{self.job_path} is damaged: {error}. {_ADVICE}.") from error
        if written_by == job or (force and isinstance(written_by, dict)):
            return
        if not isinstance(written_by, dict):  # nor may it be forced: it could be anybody's
            raise RefusedOutput(
                f"{self.path} is not empty, and no {self.job_path.name} says that run-batch made "
                f"it. {_ADVICE}."
            )
        old, new = _flat(written_by), _flat(job)
        if self._retry_failed:  # lines were mended; those with a result are compared one by one
            old["input"] = new.get("input")
        names = [n for n in sorted({*old, *new}) if old.get(n) != new.get(n)]
        if not names:
            return
        differences = "; ".join(f"{n}: {old.get(n)!r} then, {new.get(n)!r} now" for n in names)
        hint = ""
        if names == ["input"]:
            hint = " If only lines with an error were mended, pass --retry-failed."
        raise RefusedOutput(
            f"{self.path} was made by another job ({differences}).{hint} {_ADVICE}, or "
            "--force-resume to mix both."
        )

    def _read_finished(self) -> None:
        """Note what is finished, and cut a last line that a crash tore: one without an end."""
        good_end = end = 0
        with open(os.dup(self._fd), "rb", buffering=_READ_BYTES) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                end += len(line)
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    key, digest = record_key(record), record_digest(record)
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise RefusedOutput(
                        f"{self.path} line {number} is damaged, or no result of run-batch. "
                        f"Repair it. {_ADVICE}."
                    ) from error
                good_end = end
                self._note(key, digest, is_error=record.get("error") is not None)
        if good_end < end:
            logger.warning("%s: cut %d bytes of a torn last line", self.path, end - good_end)
            os.ftruncate(self._fd, good_end)

    def _note(self, key: str | int, digest: str, *, is_error: bool) -> None:
        # A line that was tried again has several results, and the last one counts.
        failed_key = _digest_key(key, "failed")
        if self._failed.discard(failed_key):
            self.num_errors -= not self._retry_failed
        elif key in self.finished_ids if isinstance(key, str) else key in self.finished_lines:
            self.num_ok -= 1
        if is_error:
            self._failed.add(failed_key)
        if is_error and self._retry_failed:
            return  # as if it had never been tried
        self.num_errors += is_error
        self.num_ok += not is_error
        if isinstance(key, str):
            self.finished_ids.add(key)
        else:
            (self.error_lines if is_error else self.finished_lines).add(key)
        self._digests.add(_digest_key(key, digest))

    def _write_job(self, job: dict[str, Any]) -> None:
        temporary = self.job_path.with_name(f"{self.job_path.name}.{os.getpid()}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(job, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.job_path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _digest_key(key: str | int, digest: str) -> str:
    return f"{type(key).__name__}:{key}:{digest}"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
