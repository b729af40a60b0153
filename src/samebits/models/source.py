"""A digest of a function's code: what a replacement was written against, whatever release the code is from."""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import textwrap
import tokenize
from typing import Any

_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@functools.cache
def digest(forward: Any) -> str:
    """A digest of a function's code: its tokens without comments, docstring and layout, alike on every Python."""
    source = textwrap.dedent(inspect.getsource(forward))
    kept: list[str] = []
    line_start = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _LAYOUT:
            line_start = line_start or token.type != tokenize.COMMENT
            continue
        if not (token.type == tokenize.STRING and line_start):
            kept.append(token.string)
        line_start = False
    return hashlib.sha256(" ".join(kept).encode()).hexdigest()[:16]
