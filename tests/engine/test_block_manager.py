"""Blocks: whose they are, which a prompt may share, and in which order they are reused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager


def fill(blocks: BlockManager, token_ids: list[int], *, share: bool = True) -> list[int]:
    """A table for `token_ids` as the scheduler makes it: hits, new blocks, full ones indexed."""
    table: list[int] = []
    hits = blocks.find_prefix(token_ids) if share else []
    blocks.share(table, hits)
    blocks.append(table, blocks.num_blocks_for(len(token_ids)) - len(hits))
    blocks.index_blocks(table, token_ids, len(hits), len(token_ids) // blocks.block_size)
    return table


def test_new_blocks_come_in_order():
    blocks = BlockManager(4, 2)
    table: list[int] = []
    assert blocks.append(table, 3) == [0, 1, 2]
    assert table == [0, 1, 2]
    assert blocks.num_free_blocks == 1


def test_blocks_are_reused_least_recently_freed_first_and_tail_before_head():
    blocks = BlockManager(6, 2)
    first = fill(blocks, [1, 2, 3, 4])  # 0, 1
    second = fill(blocks, [5, 6, 7, 8])  # 2, 3
    blocks.release(second)
    blocks.release(first)
    table: list[int] = []
    # Never used ones were free before any other.
    assert blocks.append(table, 6) == [4, 5, 3, 2, 1, 0]


def test_a_taken_and_freed_block_goes_to_the_end_of_the_line():
    blocks = BlockManager(3, 2)
    first = fill(blocks, [1, 2])  # 0
    blocks.release(first)  # line: 1, 2, 0
    hit: list[int] = []
    blocks.share(hit, blocks.find_prefix([1, 2, 3]))
    assert hit == [0]
    other = blocks.append([], 1)
    assert other == [1]
    blocks.release(hit)
    blocks.release(other)
    assert blocks.append([], 3) == [2, 0, 1]


def test_hashes_begin_with_the_root():
    hashes = []
    for root_hash in (0, 5, 2**64 - 1):
        blocks = BlockManager(4, 2, root_hash=root_hash)
        table = fill(blocks, [1, 2, 3, 4, 5])
        assert blocks.find_prefix([1, 2, 3, 4, 5]) == table[:2]
        blocks.check_invariants([table])
        hashes.append(set(blocks._index))
    assert not (hashes[0] & hashes[1] or hashes[1] & hashes[2] or hashes[0] & hashes[2])


def test_the_number_of_blocks_rounds_up():
    blocks = BlockManager(1, 16)
    assert [blocks.num_blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_a_hit_never_covers_the_last_token():
    blocks = BlockManager(8, 2)
    fill(blocks, [1, 2, 3, 4])
    assert blocks.find_prefix([1, 2, 3, 4]) == [0]  # block 1 holds the last token
    assert blocks.find_prefix([1, 2, 3, 4, 5]) == [0, 1]
    assert blocks.find_prefix([1, 2]) == []
    assert blocks.find_prefix([1]) == []
    assert blocks.find_prefix([]) == []


def test_a_hit_ends_at_the_first_block_that_differs():
    blocks = BlockManager(8, 2)
    fill(blocks, [1, 2, 3, 4, 5, 6])
    assert blocks.find_prefix([1, 2, 9, 4, 5, 6, 7]) == [0]
    assert blocks.find_prefix([9, 2, 3, 4, 5, 6, 7]) == []


def test_the_same_tokens_under_another_parent_are_no_hit():
    blocks = BlockManager(8, 2)
    fill(blocks, [1, 2, 3, 4])
    fill(blocks, [7, 8, 3, 4])
    assert blocks.find_prefix([7, 8, 3, 4, 0]) == [2, 3]
    assert blocks.find_prefix([3, 4, 0]) == []


def test_a_freed_block_is_found_until_it_is_reused():
    blocks = BlockManager(2, 2)
    blocks.release(fill(blocks, [1, 2, 3, 4]))
    assert blocks.find_prefix([1, 2, 3, 4, 5]) == [0, 1]
    assert blocks.append([], 1) == [1]  # the tail goes first
    assert blocks.find_prefix([1, 2, 3, 4, 5]) == [0]
    assert blocks.append([], 1) == [0]
    assert blocks.find_prefix([1, 2, 3, 4, 5]) == []


def test_free_blocks_that_are_hits_are_not_counted_as_room():
    blocks = BlockManager(3, 2)
    table = fill(blocks, [1, 2, 3, 4])
    hits = blocks.find_prefix([1, 2, 3, 4, 5])
    assert blocks.num_free_blocks_after_hits(hits) == 1
    blocks.release(table)
    assert blocks.num_free_blocks == 3
    assert blocks.num_free_blocks_after_hits(hits) == 1


def test_shared_blocks_are_freed_by_their_last_user():
    blocks = BlockManager(4, 2)
    first, second = fill(blocks, [1, 2, 3]), fill(blocks, [1, 2, 4])
    assert first == [0, 1] and second == [0, 2]
    blocks.release(first)
    assert blocks.num_free_blocks == 2
    blocks.check_invariants([second])
    blocks.release(second)
    assert blocks.num_free_blocks == 4
    assert second == []


@pytest.mark.parametrize("constant", [0, 7])
def test_a_hash_that_always_collides_costs_hits_and_never_gives_wrong_blocks(monkeypatch, constant):
    """Equal hashes of other tokens, or of equal tokens under another parent, are no hits."""
    monkeypatch.setattr(block_manager, "_prefix_hash", lambda parent, tokens: constant)
    blocks = BlockManager(8, 2)
    first = fill(blocks, [1, 2, 3, 4])
    assert blocks.find_prefix([1, 2, 9]) == [0]
    assert blocks.find_prefix([1, 2, 3, 4, 5]) == [0]  # block 1 met a taken hash: not shared
    assert blocks.find_prefix([3, 4, 5]) == []
    second = fill(blocks, [5, 6, 1, 2])
    assert blocks.find_prefix([5, 6, 1, 2, 0]) == []
    blocks.check_invariants([first, second])
    blocks.release(first)
    blocks.release(second)
    blocks.append([], 8)
    assert blocks.find_prefix([1, 2, 9]) == []


def test_equal_tokens_under_another_parent_with_an_equal_hash_miss(monkeypatch):
    monkeypatch.setattr(
        block_manager, "_prefix_hash", lambda parent, tokens: int.from_bytes(tokens, "little")
    )
    blocks = BlockManager(8, 2)
    fill(blocks, [1, 2, 3, 4])
    fill(blocks, [7, 8])
    assert blocks.find_prefix([7, 8, 3, 4, 5]) == [2]  # not block 1, whose parent is block 0


def test_ids_that_are_equal_in_their_last_byte_are_told_apart():
    """65 and 321 are one byte, 0x41, to a hash of truncated ids."""
    blocks = BlockManager(8, 2)
    fill(blocks, [65, 66, 67])
    assert blocks.find_prefix([321, 66, 67]) == []
    assert blocks.find_prefix([65, 66, 67]) == [0]
    fill(blocks, [2**16 + 65, 66, 67])
    assert blocks.find_prefix([2**16 + 65, 66, 1]) == [2]


def test_one_prefix_computed_twice_keeps_its_first_entry_and_shares_children():
    blocks = BlockManager(8, 2)
    first = fill(blocks, [1, 2, 3], share=False)  # 0, 1
    second = fill(blocks, [1, 2, 3, 4, 5], share=False)  # 2, 3, 4
    assert blocks.find_prefix([1, 2, 9]) == [0]
    assert blocks.find_prefix([1, 2, 3, 4, 9]) == [0, 3]  # block 3's parent equals block 0
    blocks.check_invariants([first, second])
    blocks.release(second)
    blocks.check_invariants([first])
    assert blocks.append([], 6) == [5, 6, 7, 4, 3, 2]
    assert blocks.find_prefix([1, 2, 9]) == [0], "only its owner takes an entry out"


def test_a_reset_forgets_content_and_keeps_tables():
    blocks = BlockManager(8, 2)
    table = fill(blocks, [1, 2, 3])
    blocks.reset_prefix_index()
    assert blocks.find_prefix([1, 2, 3]) == []
    blocks.check_invariants([table])
    # A child of a forgotten block does not enter either: it would be found as a prompt's beginning.
    blocks.index_blocks(table, [1, 2, 3, 4], 1, 2)
    assert blocks.find_prefix([1, 2, 3, 4, 5]) == blocks.find_prefix([3, 4, 5]) == []
    blocks.release(table)
    fill(blocks, [1, 2, 3])
    assert len(blocks.find_prefix([1, 2, 3])) == 1


def test_without_prefix_caching_nothing_is_found():
    blocks = BlockManager(8, 2, enable_prefix_caching=False)
    first, second = fill(blocks, [1, 2, 3]), fill(blocks, [1, 2, 3])
    assert blocks.find_prefix([1, 2, 3]) == []
    assert not set(first) & set(second)


def test_a_second_release_is_noticed():
    blocks = BlockManager(4, 2)
    table = blocks.append([], 2)
    copy = list(table)
    blocks.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        blocks.release(copy)


def test_taking_more_than_is_free_is_noticed():
    blocks = BlockManager(2, 2)
    with pytest.raises(AssertionError, match="num_free_blocks"):
        blocks.append([], 3)


def test_an_empty_table_may_be_released():
    blocks = BlockManager(2, 2)
    blocks.release([])
    assert blocks.num_free_blocks == 2


def test_the_checker_finds_a_lost_block():
    blocks = BlockManager(2, 2)
    blocks.append([], 1)
    with pytest.raises(AssertionError):
        blocks.check_invariants([])


class BlockMachine(RuleBasedStateMachine):
    """Random tables over three tokens, against a model that knows what each block holds."""

    tables = Bundle("tables")
    SIZE = 2
    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.NUM_BLOCKS, self.SIZE)
        self.live: list[tuple[list[int], list[int]]] = []  # (table, token ids)
        self.content: dict[int, tuple[int, ...]] = {}  # indexed block -> all tokens up to its end
        self.free = list(range(self.NUM_BLOCKS))  # in the order of reuse

    def take(self, table: list[int], num_blocks: int) -> None:
        expected, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert self.blocks.append(table, num_blocks) == expected
        for block_id in expected:
            self.content.pop(block_id, None)

    def index(self, table: list[int], token_ids: list[int], start: int) -> None:
        end = len(token_ids) // self.SIZE
        self.blocks.index_blocks(table, token_ids, start, end)
        for i in range(start, end):
            self.content[table[i]] = tuple(token_ids[: (i + 1) * self.SIZE])

    @rule(
        target=tables,
        token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        share=st.booleans(),
    )
    def admit(self, token_ids, share):
        hits = self.blocks.find_prefix(token_ids) if share else []
        assert len(hits) * self.SIZE < len(token_ids)
        for i, block_id in enumerate(hits):
            assert self.content[block_id] == tuple(token_ids[: (i + 1) * self.SIZE])
        num_new = self.blocks.num_blocks_for(len(token_ids)) - len(hits)
        room = len([block_id for block_id in self.free if block_id not in hits])
        assert self.blocks.num_free_blocks_after_hits(hits) == room
        if num_new > room:
            return ([], [])
        table: list[int] = []
        self.blocks.share(table, hits)
        self.free = [block_id for block_id in self.free if block_id not in hits]
        self.take(table, num_new)
        self.index(table, token_ids, len(hits))
        self.live.append((table, list(token_ids)))
        return self.live[-1]

    @rule(pair=tables, token_id=st.integers(0, 2))
    def grow(self, pair, token_id):
        table, token_ids = pair
        if not table or len(token_ids) >= 12:
            return
        if len(token_ids) == len(table) * self.SIZE:
            if not self.free:
                return
            self.take(table, 1)
        token_ids.append(token_id)
        if len(token_ids) % self.SIZE == 0:
            self.index(table, token_ids, len(token_ids) // self.SIZE - 1)

    @rule(pair=consumes(tables))
    def release(self, pair):
        table, _ = pair
        self.live = [other for other in self.live if other is not pair]
        still_held = {block_id for other, _ in self.live for block_id in other}
        freed = [block_id for block_id in reversed(table) if block_id not in still_held]
        self.blocks.release(table)
        self.free += freed
        assert table == []

    @rule()
    def reset(self):
        self.blocks.reset_prefix_index()
        self.content.clear()

    @invariant()
    def books_are_right(self):
        self.blocks.check_invariants([table for table, _ in self.live])
        assert self.blocks.num_free_blocks == len(self.free)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class CollidingBlockMachine(BlockMachine):
    """With a hash of two bits: hits are fewer, and never wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.real = block_manager._prefix_hash
        block_manager._prefix_hash = lambda parent, tokens: self.real(parent, tokens) % 4

    def teardown(self) -> None:
        block_manager._prefix_hash = self.real


TestCollidingBlockMachine = CollidingBlockMachine.TestCase
TestCollidingBlockMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
