"""A slow, plain model of a KV cache kept as a radix tree with leaf-LRU eviction. The block pool is held to it.

Nodes are pages of one block each. Every release touches all nodes on its path. When a page is needed and none is blank,
the leaf that nobody references and that was touched least recently goes. There are no block ids, keys or queues here: a
prefix is named by an integer that the caller gives each distinct prefix, and everything is found by searching.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Page:
    """One block of memory; a node of the tree if `prefix` is set."""

    references: int = 0
    prefix: int | None = None
    parent: Page | None = None
    children: dict[int, Page] = field(default_factory=dict)
    touched: int = 0


class RadixOracle:
    """Tables are named by any hashable, given by the caller."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.root = Page()
        self.tables: dict[object, list[Page]] = {}
        self._may_insert: dict[object, bool] = {}
        self._clock = 0

    def nodes(self) -> list[Page]:
        """All cached pages."""
        return list(_walk(self.root))

    def num_blank(self) -> int:
        used = {*self.nodes()}.union(*self.tables.values())
        return self.capacity - len(used)

    def num_free(self) -> int:
        return self.num_blank() + sum(not node.references for node in self.nodes())

    def find(self, prefixes: Sequence[int]) -> list[Page]:
        """The longest cached path."""
        path, node = [], self.root
        for prefix in prefixes:
            if prefix not in node.children:
                break
            node = node.children[prefix]
            path.append(node)
        return path

    def admit(self, name: object, path: Sequence[Page], num_pages: int) -> None:
        """Hold the pages of `path` (cached, or another table's), and new ones up to `num_pages`."""
        for page in path:
            page.references += 1
        self.tables[name] = list(path)
        self._may_insert[name] = all(page.prefix is not None for page in path)
        self.extend(name, num_pages)

    def extend(self, name: object, num_pages: int) -> None:
        table = self.tables[name]
        while len(table) < num_pages:
            if not self.num_blank():
                self._evict(self.next_leaf(set()))
            table.append(Page(references=1))

    def insert(self, name: object, prefixes: Sequence[int]) -> None:
        """The table's first pages are written: put them in the tree, or use the equal ones that are there already."""
        table, node = self.tables[name], self.root
        if not self._may_insert[name]:
            return
        for at, prefix in enumerate(prefixes):
            page = table[at]
            known = node.children.get(prefix)
            if known is None:
                page.prefix, page.parent = prefix, node
                node.children[prefix] = page
            elif known is not page:
                page.references -= 1
                known.references += 1
                table[at] = known
            node = table[at]

    def release(self, name: object) -> None:
        self._clock += 1
        for page in self.tables.pop(name):
            page.references -= 1
            page.touched = self._clock

    def reset(self) -> None:
        for node in self.nodes():
            node.prefix, node.parent, node.children = None, None, {}
        self.root = Page()
        self._may_insert = dict.fromkeys(self._may_insert, False)

    def cached(self) -> set[int]:
        return {node.prefix for node in self.nodes() if node.prefix is not None}

    def eviction_order(self) -> list[int]:
        """The prefixes that would go, one after the other, if nothing else happened."""
        gone: set[Page] = set()
        order = []
        while len(gone) < sum(not node.references for node in self.nodes()):
            leaf = self.next_leaf(gone)
            gone.add(leaf)
            assert leaf.prefix is not None
            order.append(leaf.prefix)
        return order

    def next_leaf(self, gone: set[Page]) -> Page:
        """The leaf touched least recently, as if the pages in `gone` had been evicted. There is never a tie: all that
        one release touches is one path, and a path has one leaf."""
        leaves = [
            node
            for node in self.nodes()
            if node not in gone and not node.references and gone.issuperset(node.children.values())
        ]
        oldest = min(leaf.touched for leaf in leaves)
        (leaf,) = [leaf for leaf in leaves if leaf.touched == oldest]
        return leaf

    def _evict(self, leaf: Page) -> None:
        assert leaf.parent is not None
        assert leaf.prefix is not None
        del leaf.parent.children[leaf.prefix]


def _walk(node: Page) -> Iterator[Page]:
    for child in node.children.values():
        yield child
        yield from _walk(child)
