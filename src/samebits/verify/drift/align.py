"""Which event of one run is which of the other: a longest common subsequence of call paths, and what was merely moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher


def align(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int | None, int | None]]:
    """Pairs of positions in the order of ``a``, with what only ``b`` has where it stood there. Every position occurs once."""
    front = 0
    while front < min(len(a), len(b)) and a[front] == b[front]:
        front += 1
    back = 0
    while back < min(len(a), len(b)) - front and a[-1 - back] == b[-1 - back]:
        back += 1
    found: list[tuple[int | None, int | None]] = [(i, i) for i in range(front)]
    end_a, end_b = len(a) - back, len(b) - back
    matcher = SequenceMatcher(None, a[front:end_a], b[front:end_b], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            found += [(front + i1 + k, front + j1 + k) for k in range(i2 - i1)]
        else:
            found += [(front + i, None) for i in range(i1, i2)]
            found += [(None, front + j) for j in range(j1, j2)]
    found += [(end_a + k, end_b + k) for k in range(back)]
    return _join_moved(found, a, b)


def _join_moved(
    found: list[tuple[int | None, int | None]], a: Sequence[Hashable], b: Sequence[Hashable]
) -> list[tuple[int | None, int | None]]:
    """Calls that both have, at other places in the order, belong together all the same."""
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    for i, j in found:
        if i is None and j is not None:
            waiting[b[j]].append(j)
    joined: list[tuple[int | None, int | None]] = []
    taken: set[int] = set()
    for i, j in found:
        if i is not None and j is None and waiting[a[i]]:
            moved = waiting[a[i]].pop(0)
            taken.add(moved)
            joined.append((i, moved))
        else:
            joined.append((i, j))
    return [(i, j) for i, j in joined if i is not None or j not in taken]
