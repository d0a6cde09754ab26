"""The pool of KV blocks: reference counts, and a prefix cache over whole blocks.

A block with a count of 0 keeps its contents while it is in the prefix cache; it is given away, least recently used
first, only when no other block is free.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

TOKEN_BYTES = np.dtype(np.int32).itemsize


class BlockManager:
    """num_blocks blocks of block_size tokens, named 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """All blocks are free and without contents."""
        self.reference_counts = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))  # without contents worth keeping, used from the end
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # in the prefix cache, without an owner, oldest first
        self._block_of: dict[bytes, int] = {}  # digest -> block
        self._contents: dict[int, tuple[bytes, bytes, bytes]] = {}  # block -> (digest, digest before it, tokens)

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated now."""
        return len(self._free) + len(self._free_cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """A block with count 1. The caller has checked num_free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._free_cached.popitem(last=False)
            self._forget(block)
        self.reference_counts[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """As many calls of allocate()."""
        if count > len(self._free):
            return [self.allocate() for _ in range(count)]
        blocks = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for block in blocks:
            self.reference_counts[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Count one more owner of each block; a cached block that was free is taken out of the free ones."""
        for block in blocks:
            if self.reference_counts[block] == 0:
                del self._free_cached[block]
            self.reference_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Count one owner less of each block. A sequence's end is evicted before its beginning, which more share."""
        for block in reversed(blocks):
            self.reference_counts[block] -= 1
            assert self.reference_counts[block] >= 0, f"block {block} released more often than taken"
            if self.reference_counts[block] == 0:
                if block in self._contents:
                    self._free_cached[block] = None
                else:
                    self._free.append(block)

    # ---- prefix cache ----

    def match(self, token_ids: np.ndarray, digests: list[bytes], root: bytes = b"") -> list[int]:
        """Blocks that hold the beginning of token_ids (int32), not shared yet. At least the last token is left to
        compute, since its logits are needed.

        digests: the chained hashes of token_ids' blocks so far; extended in place as far as wanted. root: what stands
        before the first block; equal tokens after another root (another adapter) have other KV.
        """
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        contents = token_ids.tobytes()
        for index in range((len(token_ids) - 1) // self.block_size):
            parent, tokens = self._digest(contents, digests, index, root)
            block = self._block_of.get(digests[index])
            # a hash may collide: what counts is that the tokens are the same
            if block is None or self._contents[block][1:] != (parent, tokens):
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: list[int]) -> int:
        """How many of the matched blocks are counted in num_free."""
        return sum(self.reference_counts[block] == 0 for block in blocks)

    def register(
        self,
        token_ids: np.ndarray,
        digests: list[bytes],
        blocks: list[int],
        first: int,
        last: int,
        root: bytes = b"",
    ) -> None:
        """Offer the whole, computed blocks first … last - 1 to the prefix cache; what is there already stays."""
        if not self.enable_prefix_caching:
            return
        contents = token_ids.tobytes()
        for index in range(first, last):
            parent, tokens = self._digest(contents, digests, index, root)
            block = blocks[index]
            if digests[index] not in self._block_of and block not in self._contents:
                self._block_of[digests[index]] = block
                self._contents[block] = (digests[index], parent, tokens)

    def reset_prefix_cache(self) -> None:
        """Forget every block's contents, since the weights that made them have changed."""
        self._free.extend(reversed(self._free_cached))
        self._free_cached.clear()
        self._block_of.clear()
        self._contents.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._contents.pop(block)[0]]

    def _digest(self, contents: bytes, digests: list[bytes], index: int, root: bytes) -> tuple[bytes, bytes]:
        """(digest of the blocks before block `index`, tokens of that block); digests then reaches to `index`."""
        parent, width = digests[index - 1] if index else root, TOKEN_BYTES * self.block_size
        tokens = contents[index * width : (index + 1) * width]
        if index == len(digests):
            digests.append(blake2b(parent + tokens, digest_size=16).digest())
        return parent, tokens
