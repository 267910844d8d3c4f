"""Which lines are finished, in few bytes each: digests of ids side by side, one bit a number."""

from __future__ import annotations

import hashlib

_NUM_BUCKETS = 1 << 14
_DIGEST_BYTES = 14  # with the bucket 126 bits: no two ids of any job share them
_PAGE_BYTES = 1024


class IdSet:
    """A set of strings, in 16 bytes each and a fixed megabyte; a set of ints takes 110."""

    def __init__(self) -> None:
        self._buckets = [bytearray() for _ in range(_NUM_BUCKETS)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, text: str) -> bool:
        bucket, digest = self._place(text)
        return _find(bucket, digest) >= 0

    def add(self, text: str) -> bool:
        """Put `text` in; False: it was in already."""
        bucket, digest = self._place(text)
        if _find(bucket, digest) >= 0:
            return False
        bucket += digest
        self._count += 1
        return True

    def discard(self, text: str) -> bool:
        """Take `text` out; False: it was not in."""
        bucket, digest = self._place(text)
        start = _find(bucket, digest)
        if start < 0:
            return False
        del bucket[start : start + _DIGEST_BYTES]
        self._count -= 1
        return True

    def _place(self, text: str) -> tuple[bytearray, bytes]:
        data = text.encode("utf-8", errors="surrogatepass")
        digest = hashlib.blake2b(data, digest_size=2 + _DIGEST_BYTES).digest()
        return self._buckets[int.from_bytes(digest[:2], "big") % _NUM_BUCKETS], digest[2:]


class NumberSet:
    """A set of integers, one bit each where they are close together."""

    def __init__(self) -> None:
        # In pages: a damaged file may name any number, which must not cost memory up to it.
        self._pages: dict[int, bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        page, bit = divmod(number, 8 * _PAGE_BYTES)
        bits = self._pages.get(page)
        return bits is not None and bool(bits[bit // 8] >> bit % 8 & 1)

    def add(self, number: int) -> bool:
        """Put `number` in; False: it was in already."""
        if number in self:
            return False
        page, bit = divmod(number, 8 * _PAGE_BYTES)
        self._pages.setdefault(page, bytearray(_PAGE_BYTES))[bit // 8] |= 1 << bit % 8
        self._count += 1
        return True


def _find(bucket: bytearray, digest: bytes) -> int:
    """Where a digest begins; one that only straddles two others does not count."""
    start = bucket.find(digest)
    while start >= 0 and start % _DIGEST_BYTES:
        start = bucket.find(digest, start + 1)
    return start
