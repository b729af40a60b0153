"""A digest of a function's code: what a replacement was written against, whatever release the code is from."""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Collection, Iterable, Iterator
from typing import Any

_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_OPENS = {getattr(tokenize, kind) for kind in ("FSTRING_START", "TSTRING_START") if hasattr(tokenize, kind)}
_CLOSES = {getattr(tokenize, kind) for kind in ("FSTRING_END", "TSTRING_END") if hasattr(tokenize, kind)}


@functools.cache
def digest(forward: Any) -> str:
    """A digest of a function's code: its tokens without comments, docstring and layout, alike on every Python."""
    source = textwrap.dedent(inspect.getsource(forward))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kept: list[str] = []
    line_start = True
    for token in whole_strings(tokens, source, _OPENS, _CLOSES):
        if token.type in _LAYOUT:
            line_start = line_start or token.type != tokenize.COMMENT
            continue
        if not (token.type == tokenize.STRING and line_start):
            kept.append(token.string)
        line_start = False
    return hashlib.sha256(" ".join(kept).encode()).hexdigest()[:16]


def whole_strings(
    tokens: Iterable[tokenize.TokenInfo], source: str, opens: Collection[int], closes: Collection[int]
) -> Iterator[tokenize.TokenInfo]:
    """The tokens with every f-string as one: Python takes them apart since 3.12, into tokens of the kinds between
    ``opens`` and ``closes``."""
    lines = source.splitlines(keepends=True)
    depth, first = 0, (0, 0)
    for token in tokens:
        if token.type in opens:
            first = first if depth else token.start
            depth += 1
        if not depth:
            yield token
        if token.type in closes:
            depth -= 1
            if not depth:
                text = _between(lines, first, token.end)
                yield tokenize.TokenInfo(tokenize.STRING, text, first, token.end, token.line)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    inner = lines[start[0] : end[0] - 1]
    return "".join((lines[start[0] - 1][start[1] :], *inner, lines[end[0] - 1][: end[1]]))
