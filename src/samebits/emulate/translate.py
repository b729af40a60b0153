"""From the source of a kernel to C++ for a CPU: instructions as calls, dynamic shared memory as a pointer.

Everything else of the device language is C++ already, with the words that ``device.h`` defines. The source is not changed in
any other way, so what runs is the kernel that the GPU runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.S)
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_INSTRUCTION = re.compile(r"(?P<name>[a-zA-Z][\w.:]*)(?:\s+(?P<operands>.*))?", re.S)
_OPERAND = re.compile(r"%(?P<place>\d+)|(?P<number>-?\d+)")
_DYNAMIC = re.compile(r"extern __shared__\s+(?:__align__\(\d+\)\s+)?(?P<type>[\w ]+?)\s+(?P<name>\w+)\[\];")
_BOUNDS = re.compile(r"\b__launch_bounds__\((?P<bounds>[^()]*(?:\([^()]*\)[^()]*)*)\)")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class UnknownSource(ValueError):
    """A construct that cannot be translated; the message names it."""


def translated(text: str, path: str) -> str:
    """A source or a header as C++, line by line where it was. ``path`` is what messages call it."""
    text = _COMMENT.sub(_blank, text)
    text = _DYNAMIC.sub(r"\g<type>* const \g<name> = reinterpret_cast<\g<type>*>(emulate::dynamic_shared);", text)
    if "extern __shared__" in text:
        raise UnknownSource(f"{path}: a declaration of dynamic shared memory that is not understood")
    return _calls(text, path)


def most_threads(source: str, path: str) -> str:
    """What a kernel says of the threads of its block, as C++."""
    bounds = _BOUNDS.findall(_COMMENT.sub(_blank, source))
    if len(bounds) != 1:
        raise UnknownSource(f"{path}: expected one __launch_bounds__, found {len(bounds)}")
    return f"emulate::first_of({bounds[0]})"


def _blank(found: re.Match[str]) -> str:
    """A comment without its words; strings stay."""
    return found[0] if found[0].startswith('"') else "\n" * found[0].count("\n") or " "


def _calls(text: str, path: str) -> str:
    """Every ``asm`` statement as calls of the functions of ``ptx.h``."""
    parts: list[str] = []
    at = 0
    while found := _ASM.search(text, at):
        end = _closing(text, found.end() - 1)
        parts += [text[at : found.start()], _call(text[found.end() : end], path)]
        at = end + 1
    return "".join((*parts, text[at:]))


def _call(inside: str, path: str) -> str:
    template, *sections = _split(inside, ":")
    operands = [_split(o, "(")[-1] for section in sections[:2] for o in _split(section, ",") if o.strip()]
    values = [o.strip().removesuffix(")") for o in operands]
    lines = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', template))
    calls = [_one_call(line.strip(), values, path) for line in lines.split(";") if line.strip()]
    return "(" + ", ".join(calls or ["void()"]) + ")" + "\n" * inside.count("\n")


def _one_call(line: str, values: list[str], path: str) -> str:
    found = _INSTRUCTION.fullmatch(line)
    words = [w.strip() for w in re.sub(r"[\[\]{}]", "", (found and found["operands"]) or "").split(",") if w.strip()]
    operands = [_OPERAND.fullmatch(word) for word in words]
    if found is None or not all(operands):
        raise UnknownSource(f"{path}: an instruction that is not understood: {line!r}")
    name = re.sub(r"\W+", "_", found["name"])
    return f"ptx::{name}({', '.join(values[int(o['place'])] if o['place'] else o['number'] for o in operands if o)})"


def _split(text: str, mark: str) -> list[str]:
    """Parts between marks that are in no bracket and no string. A bracket as mark splits at its first opening."""
    parts, depth, start = [], 0, 0
    for at, sign in _outside_strings(text):
        if sign == mark and depth == 0:
            parts.append(text[start:at])
            start = at + 1
            if mark in _CLOSING:
                break
        elif sign in _CLOSING:
            depth += 1
        elif sign in _CLOSING.values():
            depth -= 1
    return [*parts, text[start:]]


def _closing(text: str, opening: int) -> int:
    depth = 0
    for at, sign in _outside_strings(text[opening:]):
        depth += (sign in _CLOSING) - (sign in _CLOSING.values())
        if depth == 0:
            return opening + at
    raise UnknownSource("a bracket is not closed")


def _outside_strings(text: str) -> Iterator[tuple[int, str]]:
    inside = False
    for at, sign in enumerate(text):
        if sign == '"':
            inside = not inside
        elif not inside:
            yield at, sign
