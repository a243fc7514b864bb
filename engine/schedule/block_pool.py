"""Which blocks of the KV cache are held, free, or free and still of use. Pure Python bookkeeping: no torch, no tensors.

A block whose keys and values have been computed can be registered under its content: the content before it and its own
tokens. A later request that begins with the same tokens then shares it. A registered block that nobody holds stays
findable until its room is needed, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PADDING_BLOCK = 0  # never given to a request: block tables are filled up with it, padding reads and writes it


class Salt(NamedTuple):
    """Who may share blocks: only requests that agree in all of it. The content before a request's first block."""

    cache_salt: str
    adapter: int  # its number, which is never another's


class Prefix(NamedTuple):
    """The longest registered beginning of a request."""

    block_ids: list[int]
    content_id: int  # of its last block; 0 if there is none


@dataclass(slots=True)
class PoolCounters:
    """Since the engine started."""

    num_queried_tokens: int = 0  # of requests that were given a seat
    num_hit_tokens: int = 0  # of those, found
    num_evictions: int = 0  # registered blocks that gave way


# The content before a block, then its own tokens as int32 bytes. Dicts compare whole keys, so hashes may collide.
_Content = tuple[int | Salt, bytes]


class BlockPool:
    """Blocks 1 to num_blocks - 1 of `block_size` tokens each.

    A content is named by a number that is given once, so equal numbers mean equal tokens from the first on. Requests
    release their blocks tail first, so a block never outlives in the cache the one before it.

    Source: PagedAttention and vLLM's automatic prefix caching, Kwon et al., SOSP 2023; nano-vllm's block manager.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.counters = PoolCounters()
        self._num_usable = num_blocks - 1
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, PADDING_BLOCK, -1))  # a stack: a small load touches little memory
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and registered, the next to give way first
        self._contents: list[_Content | None] = [None] * num_blocks
        self._index: dict[_Content, tuple[int, int]] = {}  # -> block id, content id
        self._next_content_id = 1

    @property
    def num_blocks(self) -> int:
        """Blocks that can be given to requests."""
        return self._num_usable

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, registered ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some request holds."""
        return self._num_usable - self.num_free

    def is_shared(self, block_id: int) -> bool:
        """Whether several requests hold the block, so that none may write to it."""
        return self._ref_counts[block_id] > 1

    def find_prefix(self, token_ids: NDArray[np.int32], salt: Salt) -> Prefix:
        """Find the longest registered beginning of `token_ids` [num_tokens] in whole blocks. Takes no references."""
        size, tokens = self.block_size, token_ids.tobytes()
        block_ids: list[int] = []
        parent: int | Salt = salt
        for start in range(0, len(token_ids) - size + 1, size):
            found = self._index.get((parent, tokens[4 * start : 4 * (start + size)]))
            if found is None:
                break
            block_ids.append(found[0])
            parent = found[1]
        return Prefix(block_ids, parent if isinstance(parent, int) else 0)

    def num_free_without(self, block_ids: Iterable[int]) -> int:
        """Return how many blocks would be free once `block_ids` are held."""
        return self.num_free - sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block: to found ones, or to those of a request that is forked."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Give out `count` blocks, one reference each. There must be as many: see `num_free`."""
        assert count <= self.num_free
        block_ids = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Take back one reference to each of a request's blocks; they come in order and are freed from the tail."""
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            assert count >= 0
            self._ref_counts[block_id] = count
            if count == 0:
                if self._contents[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def register(self, block_id: int, parent: int | Salt, token_ids: NDArray[np.int32]) -> int:
        """Make a held block findable. Its keys and values must have been computed.

        Args:
            block_id: The block.
            parent: Content id of the block before it in its request; the request's Salt for the first.
            token_ids: [block_size].

        Returns:
            The content's id. Where another block has this content already, that one stays the one that is found.
        """
        content = (parent, token_ids.tobytes())
        found = self._index.get(content)
        if found is not None:
            return found[1]
        content_id = self._next_content_id
        self._next_content_id += 1
        self._contents[block_id] = content
        self._index[content] = (block_id, content_id)
        return content_id

    def try_reset(self) -> bool:
        """Forget the content of every block; False, and nothing is forgotten, while any block is held."""
        if self.num_used:
            return False
        for block_id in self._cached:
            self._contents[block_id] = None
        self._blank += reversed(self._cached)
        self._cached.clear()
        self._index.clear()
        return True

    def _evict(self) -> int:
        """Take the block that was used least recently out of the index."""
        block_id, _ = self._cached.popitem(last=False)
        content = self._contents[block_id]
        assert content is not None
        del self._index[content]
        self._contents[block_id] = None
        self.counters.num_evictions += 1
        return block_id
