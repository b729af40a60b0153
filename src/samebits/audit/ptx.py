"""Read PTX text into instructions. Statements end at ``;``; a brace opens a block only at the start of one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from samebits.audit.code import AuditError, Function, Instruction, Module

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LINE_DIRECTIVE = re.compile(r"^[ \t]*(\.(version|target|address_size|loc|file)\b|@@)[^\n]*", re.M)
_HEADER = re.compile(r"\.(entry|func)\b\s*(?:\([^)]*\)\s*)?([\w$%]+)")
_LABEL = re.compile(r"^\s*[\w$%]+:(?!:)\s*")
_INSTRUCTION = re.compile(r"^(?:@!?%?[\w$]+\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_VERSION = re.compile(r"^[ \t]*\.version\s+([\d.]+)", re.M)
_TARGET = re.compile(r"^[ \t]*\.target\s+(\w+)", re.M)
_PRODUCER = re.compile(r"Cuda compilation tools, release [\d.]+, (V[\d.]+)")


@dataclass
class _Open:
    name: str
    entry: bool
    depth: int
    instructions: list[Instruction] = field(default_factory=list)
    local: list[str] = field(default_factory=list)


def parse(text: str) -> Module:
    """Every function of a PTX file with its instructions. :class:`AuditError` if the text is no PTX or has no code."""
    text = text.rstrip("\0")
    target = _TARGET.search(text)
    if not _VERSION.search(text) or not target:
        raise AuditError("not PTX: it has no .version and .target")
    producer = _PRODUCER.search(text)
    functions = _functions(_blank(_LINE_DIRECTIVE, _blank(_COMMENT, text)))
    if not functions:
        raise AuditError("the PTX defines no function")
    return Module(target.group(1), tuple(functions), producer.group(1) if producer else "")


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Remove matches but keep the line numbers."""
    return pattern.sub(lambda match: "\n" * match.group().count("\n") or " ", text)


def _functions(text: str) -> list[Function]:
    done: list[Function] = []
    current: _Open | None = None
    pending, start, line = "", 1, 1
    depth = operand = skip = 0
    for char in text:
        if char == "\n":
            line += 1
        if skip:
            skip += (char == "{") - (char == "}")
            continue
        if not pending.strip():
            pending, start = "", line
        if char == "{" and operand == 0:
            header = _HEADER.search(pending)
            if header and current is None:
                current = _Open(header.group(2), header.group(1) == "entry", depth)
                depth, pending = depth + 1, ""
            elif pending.lstrip().startswith(".section"):
                skip, pending = 1, ""
            elif _only_labels(pending):
                depth, pending = depth + 1, ""
            else:
                operand, pending = 1, pending + char
        elif char == "{":
            operand, pending = operand + 1, pending + char
        elif char == "}" and operand:
            operand, pending = operand - 1, pending + char
        elif char == "}":
            if not _only_labels(pending):
                raise AuditError(f"line {start}: PTX statement without an end: {pending.strip()!r}")
            depth, pending = depth - 1, ""
            if current is not None and depth == current.depth:
                done.append(Function(current.name, tuple(current.instructions), current.entry, tuple(current.local)))
                current = None
        elif char == ";" and operand == 0:
            if current is not None:
                _statement(current, pending, start)
            pending = ""
        else:
            pending += char
    if current is not None or depth or not _only_labels(pending):
        raise AuditError("the PTX ends inside a function: the file is cut off")
    return done


def _only_labels(text: str) -> bool:
    while match := _LABEL.match(text):
        text = text[match.end() :]
    return not text.strip()


def _statement(into: _Open, text: str, line: int) -> None:
    while match := _LABEL.match(text):
        line += text[: match.end()].count("\n")
        text = text[match.end() :]
    text = text.strip()
    if not text:
        return
    if text.startswith("."):
        if text.startswith(".local"):
            into.local.append(f"line {line}: {' '.join(text.split())}")
        return
    found = _INSTRUCTION.match(text)
    if not found:
        raise AuditError(f"line {line}: not a PTX instruction: {text!r}")
    into.instructions.append(Instruction(found.group(1), " ".join(found.group(2).split()), f"line {line}"))
