"""Choose the backend and the launch plan of a call. Pure: it sees shapes, strides and devices, never a value."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from samebits.contract import BackendSpec, OpSpec

Strictness = Literal["warn", "strict", "silent"]


@dataclass(frozen=True)
class DeviceInfo:
    """What dispatch may know about where the tensors are. ``arch`` is 90 for sm_90; 0 off the GPU."""

    kind: str
    arch: int = 0
    multiprocessors: int = 0
    name: str = ""
    shared_bytes: int = 0
    """The most shared memory that one block may ask for."""


@dataclass(frozen=True)
class Layout:
    """One tensor input as a kernel will see it: rows by trailing axes, in elements."""

    dtype: str
    strides: tuple[int, ...]
    """Stride of the row, then of each trailing axis."""
    aligned: bool
    """Base address and every outer stride are multiples of 16 bytes, so 16-byte loads are legal."""


@dataclass(frozen=True)
class Call:
    """Everything that may influence a plan."""

    op: str
    backward: bool
    contract: str
    rows: int
    sizes: tuple[tuple[str, int], ...]
    layouts: tuple[tuple[str, Layout], ...]
    """Inputs by name; an absent optional input is not listed."""
    wanted: tuple[str, ...]
    """Results to compute, by name."""
    grad_dtype: str
    device: DeviceInfo
    out_dtype: str | None = None
    """What the caller asked the wide results of a forward to be; None: as declared."""

    def size(self, axis: str) -> int:
        return dict(self.sizes)[axis]

    def layout(self, name: str) -> Layout:
        return dict(self.layouts)[name]

    def has(self, name: str) -> bool:
        return any(key == name for key, _ in self.layouts)

    @property
    def aligned(self) -> bool:
        return all(layout.aligned for _, layout in self.layouts)


@dataclass(frozen=True)
class Choice:
    backend: str
    plan: object
    reason: str
    rejected: tuple[str, ...] = ()
    """Why each more preferred backend was passed over."""


class UnsupportedError(ValueError):
    """No backend accepts the call, or the policy forbids the one that would. The message says which and why."""


# --- policy -----------------------------------------------------------------------------------------------------------

# Both settings hold for the whole process: a backward runs on a thread of torch's own, and must not escape them. The one
# opened last holds; closing a block takes away its own entry, so blocks of several threads may end in any order.
_policies: list[tuple[object, Strictness]] = []
_forced_plans: list[tuple[object, int]] = []


@contextlib.contextmanager
def policy(strictness: Strictness) -> Iterator[None]:
    """What to do, while the block is open, when a call cannot run as asked in place and on the fastest backend.

    ``warn`` (default) says so once per operator and cause; ``strict`` refuses slower backends and copies with
    :class:`UnsupportedError`; ``silent`` says nothing. Holds for every thread of the process, backward included. Open it
    around a compiled function, not inside.
    """
    if strictness not in ("warn", "strict", "silent"):
        raise ValueError(f"policy must be 'warn', 'strict' or 'silent', not {strictness!r}")
    with _entry(_policies, strictness, "policy"):
        yield


def strictness() -> Strictness:
    return _policies[-1][1] if _policies else "warn"


@contextlib.contextmanager
def force_plan(index: int) -> Iterator[None]:
    """Run the ``index``-th launch plan of every call (modulo their number) instead of the first. For verification."""
    with _entry(_forced_plans, index, "force_plan"):
        yield


def forced_plan() -> int:
    return _forced_plans[-1][1] if _forced_plans else 0


@contextlib.contextmanager
def _entry(entries: list[Any], value: Any, name: str) -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        raise RuntimeError(f"open samebits.{name} around the compiled call; inside it, it would be traced away")
    entry = (object(), value)
    entries.append(entry)
    try:
        yield
    finally:
        entries.remove(entry)


# --- choice -----------------------------------------------------------------------------------------------------------


def refusal(
    spec: OpSpec, backend: str, device: DeviceInfo, installed: dict[str, str | None], contract: str
) -> str | None:
    """Why ``backend`` cannot take the call, or None. ``installed`` maps a backend to why it cannot be imported."""
    declared = next((b for b in spec.backends if b.name == backend), None)
    if declared is None:
        known = ", ".join(repr(b.name) for b in spec.backends)
        return f"{spec.name} has no backend named {backend!r}; choose one of {known}"
    if not declared.keeps(contract):
        kept = " or ".join(map(repr, declared.contracts))
        wrong = f"backend {backend!r} gives the bits of contract {kept}, not of {contract!r}: {declared.why}"
        return unable(declared, device, None) or wrong
    return unable(declared, device, installed.get(backend))


def unable(backend: BackendSpec, device: DeviceInfo, missing: str | None) -> str | None:
    """Why a backend runs nothing on a device, or None. ``missing``: why it cannot be imported."""
    if backend.min_arch is not None:
        if device.kind != "cuda":
            return f"backend {backend.name!r} needs a CUDA tensor; the inputs are on {device.kind!r}"
        if device.arch < backend.min_arch:
            least, here = backend.min_arch / 10, device.arch / 10
            return f"backend {backend.name!r} needs compute capability {least} or later; this GPU has {here}"
    return None if missing is None else f"backend {backend.name!r} is not usable here: {missing}"


TENSOR_CORE_ARCH = 90
"""Whose tensor cores :mod:`samebits.exact.tensor_core` describes."""


def other_tensor_core(call: Call, instead: str = "") -> str | None:
    """Why a contract of the tensor-core model is not given on this GPU, or None. ``instead``: what runs there."""
    if call.device.arch == TENSOR_CORE_ARCH:
        return None
    return (
        f"contract {call.contract!r} is the arithmetic of the tensor cores of compute capability {TENSOR_CORE_ARCH / 10}, "
        f"which those of {call.device.arch / 10} have not been shown to share{instead and '; '}{instead}"
    )


def choose(
    spec: OpSpec,
    call: Call,
    asked: str | None,
    installed: dict[str, str | None],
    plans: dict[str, tuple[object, ...]] | None = None,
) -> Choice:
    """Pick a backend (the asked one or nothing else; otherwise the first that accepts), and its plan.

    ``plans`` maps a backend to its plans for this call, best first; the bits of all of them are the same.
    """
    candidates = [asked] if asked is not None else [b.name for b in spec.backends]
    rejected: list[str] = []
    for name in candidates:
        why = refusal(spec, name, call.device, installed, call.contract)
        if why is not None:
            rejected.append(why)
            continue
        options = (plans or {}).get(name, (None,))
        plan = options[forced_plan() % len(options)]
        reason = "asked for" if asked is not None else ("preferred" if not rejected else "first that accepts the call")
        if call.rows == 0:
            reason += "; no rows, so nothing is launched"
        return Choice(name, plan, reason, tuple(rejected))
    raise UnsupportedError("; ".join(rejected))


def slower_than_preferred(choice: Choice, call: Call) -> bool:
    """True where a CUDA tensor ended on something else than the first backend without being asked to."""
    return call.device.kind == "cuda" and bool(choice.rejected)
