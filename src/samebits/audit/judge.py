"""Look for what the rules forbid. PTX decides about arithmetic wherever it exists, SASS about memory and registers.

An IEEE ``div.rn.f32`` is fused multiply-adds and an approximate reciprocal by the time it is SASS, so approximation and
flushing are judged there only when there is nothing better, see :mod:`samebits.audit.ieee`. Contraction is judged in
both: for sm_100 ptxas 12.9 (in Triton 3.6) and 13.0 (in NVRTC) fuse ``mul.rn.f32x2`` with ``add.rn.f32x2`` into FFMA2,
even with ``--fmad=false``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from samebits.audit import ieee
from samebits.audit.code import Function, Instruction, Module
from samebits.audit.limits import Limits
from samebits.audit.rules import EXAMPLES, Finding, Verdict

_FLOATS = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64", "e4m3", "e5m2", "e4m3x2", "e5m2x2"))
_ROUNDINGS = frozenset(("rn", "rz", "rm", "rp", "rna", "rs"))
_SASS_FLOAT = re.compile(r"\.(F16|BF16|F32|F64)")
_SASS_ARITHMETIC = re.compile(r"^(F(ADD|MUL|FMA|SET|SEL|MNMX|SWZADD|2F|2FP|RND)|H(ADD|MUL|FMA|SET|MNMX)|MUFU)")
_PTX_TENSOR = re.compile(r"^(mma|wmma\.mma|wgmma\.mma_async|tcgen05\.mma)\b(?!.*(\.s32|::i8|\.b1\b))")
_SASS_TENSOR = re.compile(r"^(HMMA|DMMA|QMMA|OMMA|[HQ]GMMA|UTC[HQO]MMA)$")
_EXPANDED = re.compile(r"^((div|rcp|sqrt|rsqrt|sin|cos|ex2|lg2|tanh)\..*f(16|32|64))")
"""PTX that ptxas may expand with fused multiply-adds of its own."""

Found = Iterator[tuple[str, Verdict, Instruction]]


def judge(ptx: Module | None, sass: Module | None, limits: Limits) -> tuple[Finding, ...]:
    """All findings of one build, most telling source first. At least one of the two must be there."""
    found: list[Finding] = []
    if ptx is not None:
        for function in ptx.functions:
            found += _collect(function, "ptx", _ptx(function, ptx, limits))
            if sass is None and function.local:
                some = function.local[:EXAMPLES]
                found.append(Finding("local-memory", "fail", function.name, "ptx", len(function.local), some))
    if sass is not None:
        keeps_apart = ptx is not None and limits.fma == "forbid" and not any(_fuses(f) for f in ptx.functions)
        expands = ptx is not None and any(_EXPANDED.match(i.opcode) for f in ptx.functions for i in f.instructions)
        for function in sass.functions:
            found += _collect(function, "sass", _sass_memory(function, ptx is not None))
            found += _frame(function)
            if ptx is None:
                found += _collect(function, "sass", _sass_arithmetic(function, limits))
            elif keeps_apart:
                found += _collect(function, "sass", _fused_behind_ptx(function, expands), paired=True)
    return tuple(f for f in found if f.rule not in limits.off)


def _collect(function: Function, source: Literal["ptx", "sass"], found: Found, paired: bool = False) -> list[Finding]:
    groups: dict[tuple[str, Verdict], list[Instruction]] = {}
    for rule, verdict, instruction in found:
        groups.setdefault((rule, verdict), []).append(instruction)
    return [
        Finding(
            rule,
            verdict,
            function.name,
            source,
            len(instructions),
            tuple(str(i) for i in instructions[:EXAMPLES]),
            _note(rule, verdict, source, instructions, paired),
        )
        for (rule, verdict), instructions in groups.items()
    ]


def _note(rule: str, verdict: Verdict, source: str, instructions: Iterable[Instruction], paired: bool) -> str:
    if paired and verdict == "fail":
        return "the PTX keeps multiply and add apart and the assembler fused them all the same"
    if paired:
        return "the PTX keeps multiply and add apart; no known form of IEEE division, reciprocal or square root"
    if rule == "contraction" and source == "ptx" and any(not _ROUNDINGS & {*i.modifiers} for i in instructions):
        return "mul and add without a rounding modifier: ptxas is free to fuse them"
    if rule == "contraction" and verdict == "suspect" and any(i.base == "DFMA" for i in instructions):
        return "double-precision division and square root are made of these too, and are not recognised without PTX"
    if rule == "contraction" and verdict == "suspect":
        return (
            "no part of an IEEE division, reciprocal or square root; SASS does not tell whether the source asked for it"
        )
    if rule == "float-atomic" and verdict == "suspect":
        return "the instruction does not say whether it carries floats"
    return ""


# --- PTX --------------------------------------------------------------------------------------------------------------


def _ptx(function: Function, module: Module, limits: Limits) -> Found:
    loose = [i for f in module.functions for i in f.instructions if _unrounded(i)]
    fusable = {i.base for i in loose} >= {"mul"} and any(i.base in ("add", "sub") for i in loose)
    for instruction in function.instructions:
        opcode, base, modifiers = instruction.opcode, instruction.base, {*instruction.modifiers}
        if base in ("fma", "mad") and modifiers & _FLOATS and limits.fma == "forbid":
            yield "contraction", "fail", instruction
        if fusable and limits.fma != "any" and _unrounded(instruction):
            yield "contraction", "fail", instruction
        allowed = {opcode, opcode.replace(".ftz", "")} & limits.approximate
        if ("approx" in modifiers or opcode.startswith("div.full")) and not allowed:
            yield "approximate", "fail", instruction
        if "ftz" in modifiers and opcode not in limits.approximate:
            yield "ftz", "fail", instruction
        if verdict := _ptx_atomic(instruction):
            yield "float-atomic", verdict, instruction
        if _PTX_TENSOR.match(opcode):
            yield "tensor-core", "fail", instruction


def _unrounded(instruction: Instruction) -> bool:
    modifiers = {*instruction.modifiers}
    return instruction.base in ("mul", "add", "sub") and bool(modifiers & _FLOATS) and not modifiers & _ROUNDINGS


def _ptx_atomic(instruction: Instruction) -> Verdict | None:
    opcode, modifiers = instruction.opcode, {*instruction.modifiers}
    if not (instruction.base in ("atom", "red", "multimem") or opcode.startswith("cp.reduce.")):
        return None
    if instruction.base == "multimem" and not modifiers & {"red", "ld_reduce"}:
        return None
    if modifiers & _FLOATS:
        return "fail"
    typeless = opcode.startswith("cp.reduce.async.bulk.tensor") and modifiers & {"add", "min", "max"}
    return "suspect" if typeless or "cas" in modifiers else None


def _fuses(function: Function) -> bool:
    """Whether the PTX asks for fused operations, or leaves them to the assembler; both are findings already."""
    return any((i.base in ("fma", "mad") and {*i.modifiers} & _FLOATS) or _unrounded(i) for i in function.instructions)


# --- SASS -------------------------------------------------------------------------------------------------------------


def _sass_memory(function: Function, has_ptx: bool) -> Found:
    for instruction in function.instructions:
        base, opcode = instruction.base, instruction.opcode
        if base in ("LDL", "STL"):
            yield "local-memory", "fail", instruction
        if re.match(r"(ATOM|RED(G|AS?)?$)", base):
            if _SASS_FLOAT.search(opcode):
                yield "float-atomic", "fail", instruction
            elif not has_ptx and re.search(r"\.CAST?\b", opcode):
                yield "float-atomic", "suspect", instruction
        if base in ("UBLKRED", "UTMAREDG") and not has_ptx:
            yield "float-atomic", "fail" if _SASS_FLOAT.search(opcode) else "suspect", instruction
        if _SASS_TENSOR.match(base):
            yield "tensor-core", "fail", instruction


def _frame(function: Function) -> list[Finding]:
    used = function.resources
    if used is None or used.stack + used.local == 0:
        return []
    stated = f"{used.stack} bytes of stack, {used.local} bytes of local memory per thread"
    return [Finding("local-memory", "fail", function.name, "sass", 1, (stated,), "as the cubin states it")]


def _sass_arithmetic(function: Function, limits: Limits) -> Found:
    known = ieee.explained(function)
    for at, instruction in enumerate(function.instructions):
        if at in known:
            continue
        if _fused(instruction) and limits.fma == "forbid":
            yield "contraction", "suspect", instruction
        name = _approximate_name(instruction)
        listed = name is not None and {name, name.replace(".approx.", ".approx.ftz.")} & limits.approximate
        if name is not None and not listed:
            yield "approximate", "suspect" if name.endswith("f64") else "fail", instruction
        if "FTZ" in instruction.modifiers and _SASS_ARITHMETIC.match(instruction.base):
            yield "ftz", "fail", instruction


def _fused_behind_ptx(function: Function, expands: bool) -> Found:
    """The PTX asks for no fused operation, so there may be none but those of expanded IEEE divisions and the like.

    Those are scalar; a packed one, or any at all where the PTX has nothing to expand, is the assembler's own doing.
    """
    known = ieee.explained(function) if expands else frozenset()
    for at, instruction in enumerate(function.instructions):
        if expands and instruction.base == "DFMA":
            continue  # double-precision expansions are not told apart; no contract computes in double precision
        if at not in known and _fused(instruction):
            certain = not expands or instruction.base == "FFMA2"
            yield "contraction", "fail" if certain else "suspect", instruction


def _fused(instruction: Instruction) -> bool:
    """A multiply-add that rounds once instead of twice. With a zero addend, or a factor 0 or 1, it is no such thing."""
    if instruction.base not in ("FFMA", "FFMA2", "FFMA32I", "DFMA", "HFMA2"):
        return False
    parts = ieee.operands(instruction)[1:]
    zero = {"RZ", "URZ"}
    if instruction.base == "HFMA2":
        # An immediate is two halves: "-RZ, RZ, 1, 0" loads a constant, "R4, 1, 1, R5" adds, "R4, R5, -RZ" multiplies.
        return not (zero & {*parts} or parts[1:3] == ["1", "1"])
    return not zero & {part.partition(".")[0] for part in parts} and "1" not in parts[:2]


def _approximate_name(instruction: Instruction) -> str | None:
    """The PTX name of a MUFU, as far as SASS shows it."""
    if instruction.base != "MUFU":
        return None
    first = instruction.modifiers[0] if instruction.modifiers else ""
    kind = "f64" if first.endswith("64H") else "f16" if "F16" in instruction.modifiers else "f32"
    base = first.removesuffix("64H")
    return f"{'rsqrt' if base == 'RSQ' else base.lower()}.approx.{kind}"
