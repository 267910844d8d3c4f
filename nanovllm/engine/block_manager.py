"""Whose each KV block is, and which full blocks a new prompt may share.

Full blocks of known tokens are indexed by a chained xxhash. A hit is believed only after the token
ids and the parent block's identity compare equal, so a hash collision costs a miss, never wrong KV.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(slots=True)
class _Block:
    """Bookkeeping of one block. `content_id` 0: not in the prefix index, nor equal to what is."""

    ref_count: int = 0
    content_id: int = 0  # names (parent's content, tokens); equal for equal prefixes
    parent_id: int = 0
    prefix_hash: int = 0
    tokens: bytes = b""


def _prefix_hash(parent_hash: int, tokens: bytes) -> int:
    return xxhash.xxh3_64_intdigest(tokens, seed=parent_hash)


class BlockManager:
    """Owns the KV cache's bookkeeping: reference counts, prefix index and eviction order."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        root_hash: int = 0,  # names what the KV depends on beside the tokens
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._is_caching = enable_prefix_caching
        self._root = _Block(prefix_hash=root_hash)
        self._blocks = [_Block() for _ in range(num_blocks)]
        # Insertion order is the order of reuse: least recently freed first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index: dict[int, int] = {}  # prefix hash -> block id
        self._num_contents = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, token_ids: list[int], max_num_tokens: int | None = None) -> list[int]:
        """Blocks that already hold the beginning of `token_ids`, in order; takes no references.

        They cover `max_num_tokens` at most, all but the last where that is not given: its forward
        pass gives the logits to sample from.
        """
        hits: list[int] = []
        if not self._is_caching:
            return hits
        if max_num_tokens is None:
            max_num_tokens = len(token_ids) - 1
        parent_id, parent_hash = self._root.content_id, self._root.prefix_hash
        for tokens in self._blocks_of_bytes(token_ids, 0, max_num_tokens // self.block_size):
            prefix_hash = _prefix_hash(parent_hash, tokens)
            block_id = self._index.get(prefix_hash)
            if block_id is None:
                break
            block = self._blocks[block_id]
            if block.tokens != tokens or block.parent_id != parent_id:
                break
            hits.append(block_id)
            parent_id, parent_hash = block.content_id, prefix_hash
        return hits

    def num_free_blocks_after_hits(self, hits: list[int]) -> int:
        """Free blocks that remain once `hits` are taken: a hit may itself be waiting for reuse."""
        return len(self._free) - sum(self._blocks[block_id].ref_count == 0 for block_id in hits)

    def share(self, block_table: list[int], hits: list[int]) -> None:
        """Append `hits` to a table, one more reference each."""
        for block_id in hits:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
        block_table.extend(hits)

    def append(self, block_table: list[int], num_blocks: int) -> list[int]:
        """Append `num_blocks` unwritten blocks to a table and return their ids."""
        assert num_blocks <= len(self._free), "the scheduler looks at num_free_blocks first"
        new_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in new_ids:
            self._forget(block_id)
            self._blocks[block_id].ref_count = 1
        block_table.extend(new_ids)
        return new_ids

    def release(self, block_table: list[int]) -> None:
        """Drop one reference to each block of a table and empty it. An empty table is fine."""
        # Tail first: a prompt's beginning is likelier to be asked for again than its end.
        for block_id in reversed(block_table):
            block = self._blocks[block_id]
            block.ref_count -= 1
            assert block.ref_count >= 0, f"block {block_id} was released twice"
            if block.ref_count == 0:
                self._free[block_id] = None
        block_table.clear()

    def index_blocks(
        self, block_table: list[int], token_ids: list[int], start: int, end: int
    ) -> None:
        """Enter blocks `start` to `end` of a table, full of known tokens, into the prefix index."""
        if not self._is_caching:
            return
        blocks_of_bytes = self._blocks_of_bytes(token_ids, start, end)
        for index, tokens in enumerate(blocks_of_bytes, start):
            parent = self._blocks[block_table[index - 1]] if index else self._root
            if index and not parent.content_id:
                return  # the parent was dropped by a reset; its children could never be reached
            prefix_hash = _prefix_hash(parent.prefix_hash, tokens)
            block = self._blocks[block_table[index]]
            owner_id = self._index.get(prefix_hash)
            if owner_id is None:
                self._index[prefix_hash] = block_table[index]
                self._num_contents += 1
                content_id = self._num_contents
            else:
                owner = self._blocks[owner_id]
                if owner.tokens != tokens or owner.parent_id != parent.content_id:
                    return  # a collision: the first owner stays, this one is simply not shared
                # The same prefix was computed twice; our children continue the indexed one.
                content_id = owner.content_id
            block.content_id, block.parent_id = content_id, parent.content_id
            block.prefix_hash, block.tokens = prefix_hash, tokens

    def reset_prefix_index(self) -> None:
        """Forget all shareable content, as after a weight update. Tables keep their blocks."""
        for block_id in range(self.num_blocks):
            self._forget(block_id)

    def check_invariants(self, block_tables: list[list[int]]) -> None:
        """Assert that no block is lost, free twice or miscounted. For tests, after every step."""
        counts = [0] * self.num_blocks
        for table in block_tables:
            for block_id in table:
                counts[block_id] += 1
        assert counts == [block.ref_count for block in self._blocks], (
            "references equal table entries"
        )
        assert set(self._free) == {i for i, count in enumerate(counts) if count == 0}
        for prefix_hash, block_id in self._index.items():
            block = self._blocks[block_id]
            assert block.prefix_hash == prefix_hash and block.content_id > 0
            assert len(block.tokens) == 4 * self.block_size

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.content_id:
            if self._index.get(block.prefix_hash) == block_id:
                del self._index[block.prefix_hash]
            block.content_id = block.parent_id = block.prefix_hash = 0
            block.tokens = b""

    def _blocks_of_bytes(self, token_ids: list[int], start: int, end: int) -> list[bytes]:
        """The token ids of blocks `start` to `end`, 4 bytes an id: a shorter code could clash."""
        tokens = np.array(
            token_ids[start * self.block_size : end * self.block_size], dtype=np.int32
        )
        data, size = tokens.tobytes(), 4 * self.block_size
        return [data[i : i + size] for i in range(0, len(data), size)]
