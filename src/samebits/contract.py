"""What an operator promises, as data. Nothing here imports torch, so a contract can be read, listed and tested anywhere.

An operator is declared once, as an :class:`OpSpec`. The torch schema, the fake kernel, the input checks and their
messages, the documentation table, the audit rules, the conformance tests and the benchmark sweep are all derived
from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Exactness = Literal["portable", "device", "kchain"]
"""``portable``: only IEEE + - * / sqrt in a fixed order, the same bits on every CPU and GPU.
``device``: also rsqrt/exp/sin/cos of the device, the same bits across backends of one architecture.
``kchain``: the tensor-core chain over ascending K, one bit class per architecture."""


@dataclass(frozen=True)
class TensorArg:
    """One tensor input of a pass.

    ``axes`` are the trailing axes by name. With ``rows=True`` any number of leading axes may stand before them; they
    are the batch, must agree between all row inputs, and are flattened to ``T`` rows.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: bool = True
    optional: bool = False
    doc: str = ""
    sample: str = "normal"
    """How verification draws it: ``normal``, ``weight`` (1 + 0.5 normal), ``positive`` (0.0625 .. 1.0625), ``unit``
    (0 .. 1) or ``small`` (normal / 64)."""
    like: str = ""
    """An input that stands before this one, whose dtype it must have."""
    below: str = ""
    """Makes it an index: integers from 0 up to the size of this axis, which every backend checks before it reads by them."""
    derived: bool = False
    """Follows from other inputs, as ``derive`` in ``ops/<op>/cases.py`` says, and is passed to save that work. Optional."""

    @property
    def integer(self) -> bool:
        return self.dtypes[0].startswith("int")


@dataclass(frozen=True)
class Result:
    """One tensor output of a pass, always contiguous.

    ``dtype="grad"`` follows the pass's ``grad_dtype`` argument; the name of an input of the pass stands for its dtype.
    """

    name: str
    axes: tuple[str, ...]
    dtype: str
    rows: bool = True
    tolerance: Literal["reduction", "elementwise"] = "reduction"
    doc: str = ""
    hidden: bool = False
    """Saved for backward, not returned by the public function."""
    wide: bool = False
    """Of a forward, where ``dtype`` names an input: ``out_dtype=torch.float32`` asks for it without its last rounding. Its
    upstream gradient is then rounded once to the dtype of that input, as the gradient of a cast would be."""


@dataclass(frozen=True)
class Scalar:
    """A number that the caller passes and that both directions share. It must be finite and at least ``minimum``."""

    name: str
    default: float
    minimum: float
    why: str
    doc: str = ""


@dataclass(frozen=True)
class Pass:
    """One direction of an operator: what goes in, what comes out."""

    inputs: tuple[TensorArg, ...]
    results: tuple[Result, ...]

    def input(self, name: str) -> TensorArg:
        return next(arg for arg in self.inputs if arg.name == name)

    def result(self, name: str) -> Result:
        return next(result for result in self.results if result.name == name)

    @property
    def wide(self) -> tuple[Result, ...]:
        """The results whose dtype ``out_dtype`` may widen."""
        return tuple(result for result in self.results if result.wide)

    def kin(self, name: str) -> tuple[str, ...]:
        """The inputs that must have the dtype of this one, itself among them."""
        roots: dict[str, str] = {}
        for arg in self.inputs:
            roots[arg.name] = roots.get(arg.like, arg.name)
        return tuple(other for other, root in roots.items() if root == roots[name])


@dataclass(frozen=True)
class Reduction:
    """The order in which one sum is taken. ``over`` is an axis name; ``T`` means the rows of the batch."""

    result: str
    over: str
    order: str


@dataclass(frozen=True)
class Proof:
    """Where a contract's bits were checked. A claim without a place is not a claim."""

    arch: str
    device: str
    torch: str
    note: str = ""


ON_H200 = (Proof("sm_90", "NVIDIA H200", "2.11.0", "every backend, all plans; driver 580, CUDA 13.0, Triton 3.6"),)


@dataclass(frozen=True)
class Contract:
    """One set of bits. A faster arithmetic is another contract with another name, never a variant of this one."""

    name: str
    summary: str
    exactness: Exactness
    reductions: tuple[Reduction, ...]
    rounding: tuple[str, ...]
    """Every point where a value is rounded to less than the accumulation type."""
    accumulate: str = "float32"
    fma: Literal["forbid", "explicit"] = "forbid"
    approximate: tuple[str, ...] = ()
    """PTX instructions without an IEEE result that the contract needs, e.g. ``rsqrt.approx.f32``."""
    source: str = ""
    proofs: tuple[Proof, ...] = ()
    dtypes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Inputs for which this contract accepts fewer dtypes than the declaration of the input lists."""
    chain_rows: int = 1
    """A fold over the rows may be cut, and continued from its ``start_<p>``, after every multiple of this many rows; 0: nowhere."""

    def accepted(self, arg: TensorArg) -> tuple[str, ...]:
        narrowed = dict(self.dtypes)
        return narrowed.get(arg.name, narrowed.get(arg.like, arg.dtypes))


@dataclass(frozen=True)
class BackendSpec:
    """What a backend accepts. ``min_arch`` is a compute capability times ten; None means any device."""

    name: Literal["cuda", "triton", "reference"]
    min_arch: int | None = None
    note: str = ""
    contracts: tuple[str, ...] = ()
    """The contracts whose bits it gives; none named: all of them."""
    why: str = ""
    """Why it does not give the others."""

    def keeps(self, contract: str) -> bool:
        return not self.contracts or contract in self.contracts


class Declared:
    """What every declaration of an operator can say of its contracts and backends."""

    name: str
    contracts: tuple[Contract, ...]
    backends: tuple[BackendSpec, ...]

    @property
    def default_contract(self) -> Contract:
        return self.contracts[0]

    def contract(self, name: str | None) -> Contract:
        """ValueError: there is no contract of this name. None: the default."""
        if name is None:
            return self.default_contract
        for contract in self.contracts:
            if contract.name == name:
                return contract
        known = ", ".join(repr(c.name) for c in self.contracts)
        raise ValueError(f"{self.name}: no contract named {name!r}; choose one of {known}")

    def keeps(self, backend: str, contract: str) -> bool:
        """Whether a backend is declared to give the bits of a contract."""
        return any(declared.name == backend and declared.keeps(contract) for declared in self.backends)


@dataclass(frozen=True)
class OpSpec(Declared):
    name: str
    summary: str
    forward: Pass
    backward: Pass
    contracts: tuple[Contract, ...]
    backends: tuple[BackendSpec, ...]
    """In order of preference."""
    scalars: tuple[Scalar, ...] = ()
    fixed_sizes: tuple[tuple[str, int], ...] = ()
    """Axes whose size the operator fixes, e.g. ``("H", 4)``."""
    size_limits: tuple[tuple[str, int, int], ...] = ()
    """(axis, least, most) for the free axes."""
    products: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Axes whose size is the product of others, e.g. ``("K", ("H", "D"))``."""
    paired: tuple[tuple[str, str], ...] = ()
    """(axis, other): columns of ``other`` that go in pairs, e.g. ``("R", "D")``: an even number, at most all of them."""
    tuned: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(axis, sizes) the kernels were tuned for; every other accepted size runs the same code."""
    through: tuple[tuple[str, str], ...] = ()
    """(input, result) where the gradient of the input is the upstream gradient of the result itself, neither computed nor
    copied: the residual of an addition. It is no result of the backward."""
    edges: tuple[str, ...] = field(default=())
    """Documented behaviour at the edges: zero rows, NaN, overflow."""

    def direction(self, backward: bool) -> Pass:
        return self.backward if backward else self.forward

    @property
    def learned(self) -> tuple[str, ...]:
        """The inputs that have a gradient, in their order."""
        known = {r.name.removeprefix("grad_") for r in self.backward.results} | {name for name, _ in self.through}
        return tuple(arg.name for arg in self.forward.inputs if arg.name in known)

    def gradient_dtypes_of(self, dtypes: Mapping[str, str]) -> tuple[str, ...]:
        """What ``grad_dtype`` may be, given the dtypes of the inputs: of several narrow ones only the leaf's own."""
        leaves = [r.name.removeprefix("grad_") for r in self.backward.results if r.dtype == "grad"]
        own = {dtypes[leaf] for leaf in leaves if leaf in dtypes and "float16" in self.forward.input(leaf).dtypes}
        return tuple(d for d in self.gradient_dtypes if d == "float32" or not own or d in own)

    @property
    def gradient_dtypes(self) -> tuple[str, ...]:
        """What ``grad_dtype`` may be: FP32, and the narrower dtypes that a leaf of such a gradient may have."""
        leaves = [r.name.removeprefix("grad_") for r in self.backward.results if r.dtype == "grad"]
        accepted = {dtype for leaf in leaves for dtype in self.forward.input(leaf).dtypes}
        return (
            "float32",
            *(dtype for dtype in ("bfloat16", "float16") if dtype in (accepted if leaves else {"bfloat16"})),
        )

    def complete(self, free: Mapping[str, int]) -> dict[str, int]:
        """The sizes of all axes, given those of the free ones."""
        sizes = {**free, **dict(self.fixed_sizes)}
        for axis, factors in self.products:
            sizes[axis] = math.prod(sizes[factor] for factor in factors)
        return sizes

    def misfit(self, sizes: Mapping[str, int]) -> str | None:
        """Why sizes that are each within their limits are not accepted together, or None."""
        for axis, other in self.paired:
            if sizes[axis] % 2 or sizes[axis] > sizes[other]:
                return f"{axis} = {sizes[axis]} columns; accepted is an even number up to {other} = {sizes[other]}"
        return None

    def fitted(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes that fit each other, as near to these as may be: at least a pair, and no more pairs than there are columns."""
        sizes = dict(sizes)
        for axis, other in self.paired:
            sizes[other] = max(sizes[other], 2)
            sizes[axis] = max(2, min(sizes[axis], sizes[other]) // 2 * 2)
        return sizes

    def beside(self) -> list[TensorArg]:
        """Backward inputs that have no counterpart in the forward: what a gradient is added to. All optional.

        ``start_<p>`` is where the fold of ``grad_<p>`` over the rows starts instead of +0, so that batches continue one
        chain; any other one is a further leg of a row gradient. Absent means zeros.
        """
        names = {a.name for a in self.forward.inputs} | {r.name for r in self.forward.results}
        return [a for a in self.backward.inputs if a.name not in names and a.name.removeprefix("grad_") not in names]


def validate(spec: OpSpec) -> None:
    """Refuse a declaration that could not be kept. Called once per operator when the registry loads it."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"OpSpec {spec.name!r}: {message}")

    need(bool(spec.contracts), "at least one contract")
    need(len({c.name for c in spec.contracts}) == len(spec.contracts), "contract names must differ")
    need(any(b.name == "reference" for b in spec.backends), "a reference backend defines the bits and must exist")
    for backend in spec.backends:
        need(
            set(backend.contracts) <= {c.name for c in spec.contracts},
            f"backend {backend.name!r} names no such contract",
        )
        need(backend.name != "reference" or not backend.contracts, "the reference defines every contract")
    forward_names = {a.name for a in spec.forward.inputs} | {r.name for r in spec.forward.results}
    known_axes = {name for name, _ in spec.fixed_sizes} | {name for name, _, _ in spec.size_limits}
    known_axes |= {name for name, _ in spec.products}
    free_axes = {name for name, _, _ in spec.size_limits}
    for pair in spec.paired:
        need(set(pair) <= free_axes, f"paired: {pair} are not free axes")
    for direction in (spec.forward, spec.backward):
        for axes in [a.axes for a in direction.inputs] + [r.axes for r in direction.results]:
            need(set(axes) <= known_axes, f"axes {axes} are neither fixed nor limited")
        seen: list[TensorArg] = []
        for arg in direction.inputs:
            if arg.like:
                other = next((a for a in seen if a.name == arg.like), None)
                need(other is not None, f"{arg.name!r} has the dtype of {arg.like!r}, which must stand before it")
                need(
                    other is None or arg.dtypes == other.dtypes,
                    f"{arg.name!r} and {arg.like!r} must list the same dtypes",
                )
            need(not arg.below or (arg.integer and arg.below in known_axes), f"{arg.name!r} is no index below an axis")
            need(not arg.derived or arg.optional, f"{arg.name!r} is derived, so it must be optional")
            seen.append(arg)
        for result in direction.results:
            known = result.dtype in ("grad", "float32", "bfloat16", "float16") or result.dtype in {a.name for a in seen}
            need(known, f"{result.name!r} has dtype {result.dtype!r}, which is neither a dtype nor an input")
            open_to_callers = direction is spec.forward and result.dtype in {a.name for a in seen}
            need(
                not result.wide or open_to_callers,
                f"{result.name!r} is wide, so it must be of a forward, in an input's dtype",
            )
        need(any(a.rows and not a.optional for a in direction.inputs), "a pass needs a row input that is always given")
    for arg in spec.beside():
        need(arg.optional, f"backward input {arg.name!r} comes from nowhere, so it must be optional")
        if arg.name.startswith("start_"):
            continued = f"grad_{arg.name.removeprefix('start_')}"
            same = [r for r in spec.backward.results if r.name == continued and not r.rows and r.axes == arg.axes]
            need(bool(same) and not arg.rows, f"{arg.name!r} must have the axes of a result {continued!r} without rows")
    for result in spec.backward.results:
        need(result.name.removeprefix("grad_") in forward_names, f"{result.name!r} is the gradient of no input")
        need(result.name.startswith("grad_"), f"backward result {result.name!r} must be named grad_<input>")
    for name, result_name in spec.through:
        joined = [a for a in spec.forward.inputs if a.name == name and not a.integer]
        joined_to = next((r for r in spec.forward.results if r.name == result_name and not r.hidden), None)
        need(bool(joined) and joined_to is not None, f"through: {name!r} is no input or {result_name!r} no result")
        fits = joined_to is not None and (joined[0].axes, joined[0].rows) == (joined_to.axes, joined_to.rows)
        need(fits, f"through: {name!r} and {result_name!r} must have the same axes")
        taken = any(r.name == f"grad_{name}" for r in spec.backward.results)
        need(not taken, f"through: grad_{name} is declared as a result of the backward too")
    reduced = {r.result for c in spec.contracts for r in c.reductions}
    results = {r.name for d in (spec.forward, spec.backward) for r in d.results}
    need(reduced <= results, f"reductions {sorted(reduced - results)} belong to no result")
    for result in spec.backward.results:
        if not result.rows:
            for contract in spec.contracts:
                need(
                    any(r.result == result.name and r.over == "T" for r in contract.reductions),
                    f"contract {contract.name!r} must state the order over rows of {result.name!r}",
                )
