"""Disassemble a cubin and read the listing into instructions, with the resources that the cubin states."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from samebits.audit.code import AuditError, Function, Instruction, Module, Resources

_SECTION = re.compile(r'^\s*\.section\s+"?\.text\.([^",\s]+)')
_OTHER_SECTION = re.compile(r'^\s*\.section\s+"?\.(?!text\.)')
_TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.M)
_FLAGS = re.compile(r"\bEF_CUDA_SM(\d+)\b")
_FUNCTION_TYPE = re.compile(r'^\s*\.type\s+"?([^",]+)"?,@function')
_LABEL = re.compile(r'^"?([^\s"/][^\s"]*)"?:$')
_AT = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s*(.*)$")
_INSTRUCTION = re.compile(r"^(?:@!?U?P(?:\d+|T)\s+)?([A-Z][A-Z0-9_]*(?:\.[\w]+)*)\s*(.*?)\s*;?$")
_ENTRY = re.compile(r'^\s*\.other\s+"?([^",]+)"?,@"STO_CUDA_ENTRY')
_USAGE = re.compile(r"^\s*Function ([^\n]+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.M)

_DETAILED = re.compile(r"^(F|D|H|MUFU|LD|ST|ATOM|RED|UTC|UBLK|UTMA|I2F|I2FP)|MMA$")
"""Opcodes whose modifiers change what is computed or how memory is touched; of all others the lock counts the base."""


@functools.cache
def tool(name: str) -> str:
    """Path of ``nvdisasm`` or ``cuobjdump``: Triton's wheel carries both, otherwise the CUDA toolkit on PATH."""
    spec = importlib.util.find_spec("triton")
    for root in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(root) / "backends" / "nvidia" / "bin" / name
        if bundled.is_file():
            return str(bundled)
    found = shutil.which(name)
    if found is None:
        raise AuditError(
            f"{name} not found: install triton (its wheel carries it) or put the CUDA toolkit's bin folder on PATH"
        )
    return found


def disassemble(cubin: bytes) -> Module:
    """Every function of a cubin. :class:`AuditError` if the tools refuse it or it holds no code."""
    with tempfile.TemporaryDirectory(prefix="samebits-audit-") as folder:
        path = Path(folder) / "code.cubin"
        path.write_bytes(cubin)
        listing = _run("nvdisasm", "-c", "-ndf", str(path))
        usage = _run("cuobjdump", "-res-usage", str(path))
    return parse(listing, usage)


def _run(name: str, *arguments: str) -> str:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True, errors="replace", timeout=300)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise AuditError(f"{name} refuses the file: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def parse(listing: str, usage: str) -> Module:
    """Read ``nvdisasm -c`` and ``cuobjdump -res-usage``. A line of code that is not understood is an error."""
    resources = {
        name: Resources(int(reg), int(stack), int(shared), int(local))
        for name, reg, stack, shared, local in _USAGE.findall(usage)
    }
    symbols: set[str] = set()
    entries: set[str] = set()
    code: dict[str, list[Instruction]] = {}
    section, routine = "", ""
    for line in listing.splitlines():
        if match := _SECTION.match(line):
            section = routine = match.group(1)
            code[section] = []
        elif _OTHER_SECTION.match(line):
            section = ""
        elif match := _FUNCTION_TYPE.match(line):
            symbols.add(match.group(1))
        elif match := _ENTRY.match(line):
            entries.add(match.group(1))
        elif (match := _LABEL.match(line)) and match.group(1) in symbols:
            routine = match.group(1)
        elif section and (match := _AT.match(line)):
            found = _INSTRUCTION.match(match.group(2))
            if not found:
                raise AuditError(f"{section}: not a SASS instruction: {line.strip()!r}")
            place = f"0x{match.group(1)}"
            code[section].append(Instruction(found.group(1), found.group(2), place, routine))
    functions = [
        Function(name, tuple(found), entry=name in entries, resources=resources.get(name))
        for name, found in sorted(code.items())
        if found
    ]
    if not functions:
        raise AuditError("the cubin holds no machine code")
    if unknown := sorted(entries - resources.keys()):
        raise AuditError(f"cuobjdump states no resource usage for {', '.join(unknown)}")
    return Module(_arch(listing), tuple(functions))


def _arch(listing: str) -> str:
    if target := _TARGET.search(listing):
        return target.group(1)
    flags = _FLAGS.search(listing)
    if not flags:
        raise AuditError("the cubin does not say which architecture it is for")
    return f"sm_{flags.group(1)}"


def histogram(function: Function) -> dict[str, int]:
    """How often each opcode occurs, sorted by name, without padding. Modifiers stay where they matter."""
    counts = Counter(
        instruction.opcode if _DETAILED.search(instruction.base) else instruction.base
        for instruction in function.instructions
        if instruction.base != "NOP"
    )
    return dict(sorted(counts.items()))
