"""Find the machine code of IEEE division, reciprocal and square root, which is made of the very instructions we forbid.

``div.rn.f32`` becomes an approximate reciprocal and fused multiply-adds whose errors cancel by design; the result is
correctly rounded. Only PTX tells that plainly. Where there is SASS alone, this module names the instructions that
belong to such an expansion, by the compiler's own routine symbols and by following registers through the inline part.
What it does not recognise stays unexplained and is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from samebits.audit.code import Function, Instruction

Code = tuple[Instruction, ...]

SLOW_PATH = re.compile(r"__cuda_sm\w*?_(div|rcp|sqrt|dblrcp|dsqrt|rem)")
"""The compiler's own out-of-line routines. ``noftz`` in the name: subnormals are live."""

_REACH = 1024
"""How many instructions an expansion may be spread over: a divisor that no loop changes has its reciprocal taken far above."""


def slow_path(instruction: Instruction) -> bool:
    """Whether it lies in a routine of the compiler for IEEE (or integer) division, reciprocal or square root."""
    name = instruction.routine
    return bool(SLOW_PATH.search(name)) and ("_ftz" not in name)


def operands(instruction: Instruction) -> list[str]:
    """Operands without sign, bars and reuse flag, so that registers compare by name."""
    return [re.sub(r"\.reuse|[|~]|^-", "", part.strip()) for part in instruction.operands.split(",")]


def explained(function: Function) -> frozenset[int]:
    """Positions of the instructions that belong to an IEEE or integer division, reciprocal or square root."""
    code = function.instructions
    found = {at for at, instruction in enumerate(code) if slow_path(instruction)}
    for at, instruction in enumerate(code):
        if at in found:
            continue
        if instruction.opcode == "FCHK":
            found |= _division(code, at, found)
        elif instruction.opcode == "MUFU.RCP":
            found |= _reciprocal(code, at) | _integer(code, at)
        elif instruction.opcode == "MUFU.RSQ":
            found |= _square_root(code, at)
    return frozenset(found)


def _division(code: Code, check: int, taken: set[int]) -> set[int]:
    """The inline part that one ``FCHK p, a, b`` guards."""
    for first in range(max(0, check - _REACH), min(len(code), check + _REACH)):
        if first not in taken and code[first].opcode == "FFMA" and code[first].operands.endswith(", 1"):
            chain = _division_from(code, check, first)
            if chain:
                return chain
    return set()


def _division_from(code: Code, check: int, first: int) -> set[int]:
    """r ~ 1/b; e = 1 - b r; s = r + r e; q = a s; t = a - b q; a/b = q + s t."""
    a, b = operands(code[check])[1:3]
    e, *r = operands(code[first])[:3]
    second = _next(code, first, "FFMA", lambda of: e in of[1:3] and bool({*r} & {*of[1:3]}))
    if second is None:
        return set()
    s = operands(code[second])[0]
    third = _next(code, second, "FFMA", lambda of: s in of[1:3] and of[3] == "RZ")
    if third is None:
        return set()
    q, *factors, _ = operands(code[third])
    if b not in r and a not in factors:  # a constant may stand in a register here and as itself there, so one will do
        return set()
    n = factors[1] if factors[0] == s else factors[0]
    fourth = _next(code, third, "FFMA", lambda of: q in of[1:3] and of[3] == n)
    if fourth is None:
        return set()
    t = operands(code[fourth])[0]
    fifth = _next(code, fourth, "FFMA", lambda of: {*of[1:3]} == {s, t} and of[3] == q)
    if fifth is None:
        return set()
    estimate = _previous(code, first, lambda i: i.opcode == "MUFU.RCP" and operands(i)[0] in r)
    return {first, second, third, fourth, fifth} | ({estimate} if estimate is not None else set())


def _reciprocal(code: Code, start: int) -> set[int]:
    """r ~ 1/b; t = b r - 1; u = -t; 1/b = r + r u."""
    r, b = operands(code[start])[:2]
    first = _next(code, start, "FFMA", lambda of: {*of[1:3]} == {r, b} and of[3] == "1")
    if first is None or not code[first].operands.endswith(", -1"):
        return set()
    t = operands(code[first])[0]
    flip = _next(code, first, "FADD.FTZ", lambda of: of[1:] == [t, "RZ"])
    if flip is None:
        return set()
    u = operands(code[flip])[0]
    last = _next(code, flip, "FFMA", lambda of: {*of[1:3]} == {r, u} and of[3] == r)
    return set() if last is None else {start, first, flip, last}


def _square_root(code: Code, start: int) -> set[int]:
    """r ~ 1/sqrt x; g = x r; h = r / 2; e = x - g g; sqrt x = g + e h."""
    r, x = operands(code[start])[:2]
    product = _next(code, start, "FMUL.FTZ", lambda of: {*of[1:]} == {r, x})
    half = _next(code, start, "FMUL.FTZ", lambda of: of[1:] == [r, "0.5"])
    if product is None or half is None:
        return set()
    g, h = operands(code[product])[0], operands(code[half])[0]
    error = _next(code, product, "FFMA", lambda of: of[1:] == [g, g, x])
    if error is None:
        return set()
    e = operands(code[error])[0]
    last = _next(code, error, "FFMA", lambda of: {*of[1:3]} == {e, h} and of[3] == g)
    return set() if last is None else {start, product, half, error, last}


def _integer(code: Code, start: int) -> set[int]:
    """An integer division estimates 1/b in float and corrects it in integers: I2F b; MUFU.RCP."""
    source = operands(code[start])[1]
    writer = _previous(code, start, lambda i: operands(i)[0] == source)
    convert = code[writer] if writer is not None else None
    return {start} if convert and convert.base in ("I2F", "I2FP") and "RP" in convert.modifiers else set()


def _next(code: Code, after: int, opcode: str, fits: Callable[[list[str]], bool]) -> int | None:
    reach = range(after + 1, min(len(code), after + _REACH))
    return next((at for at in reach if code[at].opcode == opcode and fits(operands(code[at]))), None)


def _previous(code: Code, before: int, fits: Callable[[Instruction], bool]) -> int | None:
    reach = range(before - 1, max(-1, before - _REACH), -1)
    return next((at for at in reach if fits(code[at])), None)
