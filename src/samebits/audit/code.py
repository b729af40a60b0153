"""Parsed code, the same shape for PTX and SASS."""

from __future__ import annotations

from dataclasses import dataclass


class AuditError(RuntimeError):
    """Code that cannot be read, or a tool that is missing. Reported as a finding of its own, never skipped."""


@dataclass(frozen=True)
class Instruction:
    opcode: str
    """With every modifier, e.g. ``mul.rn.f32`` or ``FSETP.GEU.FTZ.AND``."""
    operands: str
    place: str
    """``line 41`` of the PTX text, or the byte offset ``0x1a0`` in the function."""
    routine: str = ""
    """SASS: the symbol that the instruction lies under; the compiler's own division routines have one."""

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    def __str__(self) -> str:
        return f"{self.place}: {self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True)
class Resources:
    """As the cubin states them: registers, stack and local bytes per thread, static shared bytes per block."""

    registers: int
    stack: int
    shared: int
    local: int


@dataclass(frozen=True)
class Function:
    name: str
    instructions: tuple[Instruction, ...]
    entry: bool = True
    local: tuple[str, ...] = ()
    """PTX: its ``.local`` declarations."""
    resources: Resources | None = None
    """SASS: None for a function that is no kernel."""


@dataclass(frozen=True)
class Module:
    arch: str
    functions: tuple[Function, ...]
    producer: str = ""
    """PTX: the compiler that wrote it, e.g. ``V13.0.88``; empty where it does not say."""

    @property
    def entries(self) -> frozenset[str]:
        return frozenset(f.name for f in self.functions if f.entry)
