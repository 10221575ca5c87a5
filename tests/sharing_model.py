"""The whole allocator as lists and dicts: `oracle.AllocatorModel` with sharing, windows and an index.

Which free block a row is handed is the allocator's choice and is learnt from the state; results, block
counts, which blocks are shared, found, evicted and given back are exact. Written without looking at the
code under test, and without looking for speed.
"""

import dataclasses
import math

import numpy as np
import oracle

import paged_kv_jax as pkv


@dataclasses.dataclass
class Node:
    """A block that the index holds."""

    parent: int | None
    tokens: tuple[int, ...]
    salt: int
    depth: int
    last_used: int


class SharingModel(oracle.AllocatorModel):
    """Tables hold block ids, None for one not yet known, and -1 where `release_before` gave it up."""

    def __init__(self, **geometry: int):
        super().__init__(**geometry)
        self.held: dict[int, Node] = {}
        self.clock = 0
        self.looked_up = self.found = 0

    # References

    def references(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values()) + (block in self.held)

    def drop(self, blocks) -> int:
        """Blocks just taken out of a table or of the index: how many nobody refers to any more."""
        freed = {block for block in blocks if block >= 0 and not self.references(block)}
        self.free_blocks |= freed
        self.num_free += len(freed)
        return len(freed)

    def free(self, seq_ids) -> list[int]:
        codes = [self._seq_failure(seq_ids, row, self.lens) for row in range(len(seq_ids))]
        ends = [seq for seq, code in zip(seq_ids, codes, strict=True) if code is None]
        return self._end(seq_ids, codes, dict.fromkeys(ends, 0))

    # sharing.py

    def fork(self, parents, children, lengths=None) -> list[int]:
        results, exhausted = [], False
        live = dict(self.lens)
        for row, (parent, child) in enumerate(zip(parents, children, strict=True)):
            if parent == -1 and child == -1:
                results.append(0)
                continue
            if 0 <= child < self.max_seqs and child in children[:row]:
                results.append(-4)
                continue
            if parent not in live or not 0 <= child < self.max_seqs or child in live:
                results.append(-2)
                continue
            length = live[parent] if lengths is None else lengths[row]
            if not self._within(parent, length, least=1):
                results.append(-5)
                continue
            full, partial = divmod(length, self.block_size)
            if partial and (exhausted or not self.num_free):
                exhausted = True
                results.append(-1)
                continue
            self.lens[child] = length
            self.tables[child] = self.tables[parent][:full] + [None] * bool(partial)
            self.num_free -= bool(partial)
            results.append(int(bool(partial)))
        return self._report(results)

    def truncate(self, seq_ids, new_lens) -> list[int]:
        codes: list[int | None] = []
        shorter: dict[int, int] = {}
        copied, exhausted = [], False
        for row, (seq, new_len) in enumerate(zip(seq_ids, new_lens, strict=True)):
            code = self._seq_failure(seq_ids, row, self.lens)
            if code is None and not self._within(seq, new_len, least=0):
                code = -5
            if code is None and new_len % self.block_size:
                tail = self.tables[seq][new_len // self.block_size]
                if self.references(tail) > 1:
                    if exhausted or not self.num_free:
                        code, exhausted = -1, True
                    else:
                        self.num_free -= 1
                        copied.append(seq)
            codes.append(code)
            if code is None:
                shorter[seq] = new_len
        return self._end(seq_ids, codes, shorter, copied)

    def release_before(self, seq_ids, positions) -> list[int]:
        codes: list[int | None] = []
        behind: dict[int, int] = {}
        for row, (seq, position) in enumerate(zip(seq_ids, positions, strict=True)):
            code = self._seq_failure(seq_ids, row, self.lens)
            if code is None and position > self.lens[seq]:
                code = -5
            codes.append(code)
            if code is None:
                behind[seq] = max(0, position) // self.block_size
        dropped = {seq: self.tables[seq][:columns] for seq, columns in behind.items()}
        for seq, columns in behind.items():
            self.tables[seq][:columns] = [-1] * columns
        return self._count_back(seq_ids, codes, dropped)

    # prefix.py

    def children(self, parent) -> dict[tuple, int]:
        return {
            (node.tokens, node.salt): block
            for block, node in self.held.items()
            if node.parent == parent
        }

    def match(self, tokens, length, salt) -> list[int]:
        return self._walk(tokens, max(0, length - 1) // self.block_size, salt)

    def admit(self, seq_ids, prompts, lens, salts, batch: int, width: int):
        """Results and found tokens; `width` is T, the most tokens a row may bring."""
        codes: list[int | None] = []
        paths: list[list[int]] = []
        for row, seq in enumerate(seq_ids):
            code = self._seq_failure(seq_ids, row, None)
            if code is None and seq in self.lens:
                code = -2
            if code is None and not 1 <= lens[row] <= width:
                code = -5
            if code is None and self._blocks(lens[row]) > self.max_blocks_per_seq:
                code = -3
            codes.append(code)
            served = code is None
            paths.append(self.match(prompts[row], lens[row], salts[row]) if served else [])
        needed = [
            self._blocks(lens[row]) - len(paths[row]) if codes[row] is None else 0
            for row in range(len(seq_ids))
        ]
        self.make_room(needed, batch, keep={block for path in paths for block in path})
        results, found, exhausted, used = [], [], False, []
        for row, seq in enumerate(seq_ids):
            code = codes[row]
            if code is None and needed[row] and (exhausted or needed[row] > self.num_free):
                code, exhausted = -1, True
            results.append(needed[row] if code is None else code)
            found.append(len(paths[row]) * self.block_size if code is None else 0)
            if code is not None:
                continue
            self.num_free -= needed[row]
            self.lens[seq] = lens[row]
            self.tables[seq] = paths[row] + [None] * needed[row]
            used += paths[row]
            self.looked_up += (lens[row] - 1) // self.block_size
            self.found += len(paths[row])
        self._use(used)
        return self._report(results), found

    def commit(self, seq_ids, tokens, lens, salts, width: int) -> list[int]:
        """Needs tables without None. Of equal blocks committed at once, the highest id is held."""
        results: list[int] = []
        rows = []
        for row, seq in enumerate(seq_ids):
            code = self._seq_failure(seq_ids, row, self.lens)
            if code is None and not 0 <= lens[row] <= min(width, self.lens[seq]):
                code = -5
            results.append(0 if code is None else code)
            if code is None:
                rows.append((row, seq, lens[row] // self.block_size))
        paths = {row: self._walk(tokens[row], full, salts[row]) for row, _, full in rows}
        for depth in range(max((full for *_, full in rows), default=0)):
            claims: dict[tuple, set[tuple[int, int]]] = {}  # (parent, tokens, salt): own blocks
            claimed: dict[int, int] = {}  # block: the row that puts it there
            reaching = [
                (row, self.tables[seq][depth])
                for row, seq, full in rows
                if depth < full and len(paths[row]) == depth
            ]
            for row, own in reaching:
                if own >= 0 and own not in self.held:
                    claimed.setdefault(own, row)
            for row, own in reaching:
                if claimed.get(own) == row:
                    claims.setdefault(
                        self._name(paths[row], tokens[row], depth, salts[row]), set()
                    ).add((own, row))
            for name, owners in claims.items():
                block, row = max(owners)
                self.held[block] = Node(*name, depth, self.clock)
                results[row] += 1
            for row, own in reaching:
                name = self._name(paths[row], tokens[row], depth, salts[row])
                block = self.children(name[0]).get(name[1:])
                if own in claimed and block is not None:
                    paths[row].append(block)
        self._use([block for path in paths.values() for block in path])
        return self._report(results)

    def make_room(self, needed, batch: int, keep=frozenset()) -> None:
        if sum(needed) <= self.num_free:
            return
        idle = [block for block in self.held if self.references(block) == 1 and block not in keep]
        totals = [sum(needed[: row + 1]) for row in range(len(needed))]
        wanted = max((t for t in totals if t <= self.num_free + len(idle)), default=0)
        if wanted > self.num_free:
            self.evict(max(wanted - self.num_free, batch), keep)

    def evict(self, count: int, keep=frozenset()) -> int:
        idle = [block for block in self.held if self.references(block) == 1 and block not in keep]
        idle.sort(key=lambda block: (self.held[block].last_used, -self.held[block].depth, block))
        return self._drop_held(idle[:count])

    def forget(self) -> int:
        return self._drop_held(list(self.held))

    # Moving

    def compact(self, num_blocks: int) -> None:
        """Blocks in use move to the front, in their order."""
        used = [block for block in range(self.num_blocks) if self.references(block)]
        new = {block: place for place, block in enumerate(used)} | {-1: -1}
        self.tables = {seq: [new[block] for block in row] for seq, row in self.tables.items()}
        self.held = {new[block]: node for block, node in self.held.items()}
        for node in self.held.values():
            node.parent = None if node.parent is None else new[node.parent]
        self.num_blocks, self.num_free = num_blocks, num_blocks - len(used)
        self.free_blocks = set(range(len(used), num_blocks))

    def check(self, state: pkv.BlockState, index: pkv.PrefixIndex | None = None) -> None:
        super().check(state)
        references = [self.references(block) for block in range(self.num_blocks)]
        assert np.asarray(state.ref_count).tolist() == references
        if index is not None:
            assert set(np.flatnonzero(np.asarray(index.is_held)).tolist()) == set(self.held)
            for block, node in self.held.items():
                assert int(index.parent[block]) == (-1 if node.parent is None else node.parent)
                assert tuple(index.tokens[block].tolist()) == node.tokens

    # Helpers

    def _blocks(self, length: int) -> int:
        return math.ceil(length / self.block_size)

    def _within(self, seq: int, length: int, least: int) -> bool:
        released = self.tables[seq].count(-1) * self.block_size
        return least <= length <= self.lens[seq] and (length == 0 or length >= released)

    def _end(self, seq_ids, codes, new_lens: dict[int, int], copied=()) -> list[int]:
        dropped: dict[int, list[int]] = {}
        for seq, new_len in new_lens.items():
            table, keep = self.tables[seq], self._blocks(new_len)
            dropped[seq] = table[keep:]
            del table[keep:]
            if seq in copied:
                dropped[seq].append(table[-1])
                table[-1] = None
            self.lens[seq] = new_len
            if not new_len:
                del self.lens[seq], self.tables[seq]
        return self._count_back(seq_ids, codes, dropped)

    def _count_back(self, seq_ids, codes, dropped: dict[int, list[int]]) -> list[int]:
        """Results of rows that dropped blocks: one that several rows drop counts for the last."""
        last = {block: seq for seq, blocks in dropped.items() for block in blocks}
        back = dict.fromkeys(dropped, 0)
        for block, seq in last.items():
            back[seq] += self.drop([block])
        results = [
            back[seq] if code is None else code for seq, code in zip(seq_ids, codes, strict=True)
        ]
        return self._report(results)

    def _name(self, path, tokens, depth: int, salt: int) -> tuple:
        own = tuple(tokens[depth * self.block_size : (depth + 1) * self.block_size])
        return (path[-1] if path else None, own, salt)

    def _walk(self, tokens, limit: int, salt: int) -> list[int]:
        path: list[int] = []
        while len(path) < limit:
            parent, *name = self._name(path, tokens, len(path), salt)
            block = self.children(parent).get(tuple(name))
            if block is None:
                break
            path.append(block)
        return path

    def _use(self, blocks) -> None:
        for block in blocks:
            self.held[block].last_used = self.clock
        self.clock += 1

    def _drop_held(self, blocks) -> int:
        gone = {block: self.held.pop(block) for block in blocks}
        while True:
            orphans = [
                block
                for block, node in self.held.items()
                if node.parent is not None and node.parent not in self.held
            ]
            if not orphans:
                return self.drop(gone)
            gone |= {block: self.held.pop(block) for block in orphans}
