"""The fingerprint of one compilation: everything that its machine code and its verdict follow from.

The compilers are deterministic, so code that was compiled and judged once need not be again while its fingerprint stays.
Nothing that differs between two machines with the same compilers enters: no path, no line number, no Python or torch
version, no order of files.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from importlib.resources import files
from typing import Any

from samebits.audit.code import AuditError
from samebits.audit.compile import arch_name
from samebits.audit.compilers import compilers
from samebits.audit.limits import Limits
from samebits.audit.listing import Job
from samebits.runtime import nvrtc, triton_build
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.triton_build import TritonKernel

_DIGITS = 32
_JUDGES = ("ieee.py", "judge.py", "ptx.py", "sass.py")
"""What reads and judges the code: under other rules everything must be judged again."""
_TOKEN = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.S)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)


def fingerprint(job: Job, arch: str) -> str:
    """32 hexadecimal digits. :class:`AuditError` if a source cannot be read."""
    kernel = job.build.kernel
    name = arch_name(job.build, arch)
    try:
        parts = _cuda(kernel, name) if isinstance(kernel, CudaKernel) else _triton(kernel, name)
    except (OSError, SyntaxError) as error:
        raise AuditError(f"its source cannot be read: {error}") from error
    return _digest(*parts, *_limits(job.limits), _judges())


def _cuda(kernel: CudaKernel, arch: str) -> list[str]:
    """Source and the headers it includes, through others too; comments and empty lines do not count."""
    own = nvrtc.headers(kernel.op)
    source = without_comments(nvrtc.source_text(kernel))
    included: dict[str, str] = {}
    todo = _INCLUDE.findall(source)
    while todo:
        name = todo.pop()
        if name in own and name not in included:  # others come with the compiler, or it refuses them
            included[name] = without_comments(own[name])
            todo += _INCLUDE.findall(included[name])
    headers = [part for name in sorted(included) for part in (name, included[name])]
    return ["cuda", _version("nvrtc"), kernel.entry, source, *headers, *nvrtc.options(kernel, arch)]


def _triton(kernel: TritonKernel, arch: str) -> list[str]:
    """The function and all device functions of ours that it calls. What is Triton's own is said by its version."""
    parts = ["triton", _version("triton"), arch, str(kernel.num_warps), repr(sorted(triton_build.OPTIONS.items()))]
    parts += [f"{name}:{kind}" for name, kind in kernel.signature]
    parts += [f"{name}={value!r}" for name, value in sorted(kernel.constexprs)]
    return parts + [f"{name}\n{text}" for name, text in sorted(_called(kernel.function).items())]


def _called(function: Any) -> dict[str, str]:
    """Source text, and the values of the globals it reads, of a Triton function and all it calls, by module and name."""
    found: dict[str, str] = {}
    todo = [function]
    while todo:
        one = todo.pop()
        name = f"{one.__module__}.{one.__name__}"
        if name in found or one.__module__.partition(".")[0] == "triton":
            continue
        text, tree = _definition(one.src)
        values = []
        for used in sorted(_names(tree)):
            value = _look_up(one.__globals__, used)
            if hasattr(value, "src") and hasattr(value, "__globals__"):
                todo.append(value)
            elif isinstance(getattr(value, "value", value), int | float | str | bool):
                values.append(f"{used}={getattr(value, 'value', value)!r}")
        found[name] = "\n".join((text, *values))
    return found


@functools.cache
def _definition(source: str) -> tuple[str, ast.Module]:
    """The text of the one ``def`` that starts it; what Python's own tools leave behind it differs by their version."""
    tree = ast.parse(source)
    return "\n".join(source.splitlines()[: tree.body[0].end_lineno]), tree


def _names(tree: ast.Module) -> set[str]:
    """Every name, and every dotted name, that the function reads."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return read | {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _dotted(node)}


def _dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _dotted(node.value))


def _look_up(scope: dict[str, Any], dotted: str) -> Any:
    first, *rest = dotted.split(".")
    value = scope.get(first)
    if rest and getattr(value, "__name__", "").partition(".")[0] == "triton":
        return None
    for name in rest:
        value = getattr(value, name, None)
    return value


@functools.cache
def without_comments(text: str) -> str:
    """C++ without comments, trailing blanks and empty lines; what stands in quotes is kept."""
    bare = _TOKEN.sub(lambda found: " " if found[0].startswith("/") else found[0], text)
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())


def _limits(limits: Limits) -> tuple[str, ...]:
    return limits.fma, ",".join(sorted(limits.approximate)), ",".join(sorted(limits.off))


@functools.cache
def _judges() -> str:
    return _digest(*((files("samebits.audit") / name).read_text() for name in _JUDGES))


@functools.cache
def _version(compiler: str) -> str:
    return compilers().get(compiler, "none")


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        state.update(len(encoded).to_bytes(8, "little"))
        state.update(encoded)
    return state.hexdigest()[:_DIGITS]
