"""The rules, as data. How each is looked for is in :mod:`samebits.audit.judge`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["fail", "suspect", "error"]
"""``suspect``: the code has what the rule forbids, or something that looks the same; the file alone cannot tell."""


@dataclass(frozen=True)
class Rule:
    name: str
    forbids: str
    why: str
    judged: str
    cannot_know: str
    remedy: str


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "float-atomic",
            forbids="atomics and reductions to memory on floating-point values",
            why="their order changes from run to run, and floating-point addition is not associative",
            judged="PTX atom, red, multimem and bulk reductions with a float type; SASS ATOM*, RED* with one",
            cannot_know="whether a compare-and-swap loop or a typeless bulk reduction carries floats: suspect",
            remedy="reduce in a fixed order: one partial per block in memory, then one pass over the partials",
        ),
        Rule(
            "contraction",
            forbids="fused multiply-add, written or left to the assembler",
            why="it rounds once where the contract rounds twice",
            judged="PTX fma and mad of floats; mul together with add or sub that carry no rounding modifier, which "
            "ptxas may fuse. In SASS every FFMA that does not belong to an IEEE division, reciprocal or square root",
            cannot_know="from SASS alone, whether the source asked for the FFMA or the compiler fused it: suspect",
            remedy="CUDA: --fmad=false and __fmul_rn/__fadd_rn; Triton: enable_fp_fusion=False, and on sm_100, where "
            "its ptxas fuses packed f32x2 operations even so, the product as scalar inline assembly (mul.rn.f32)",
        ),
        Rule(
            "approximate",
            forbids="approximate instructions that the contract does not list",
            why="their results differ between architectures",
            judged="PTX .approx and div.full, by exact name; in SASS alone MUFU outside IEEE division, reciprocal and "
            "square root",
            cannot_know="from SASS alone, which PTX instruction or library function a MUFU came from; a 64-bit MUFU is "
            "suspect because double-precision division and square root are built on it",
            remedy="CUDA: --prec-div=true --prec-sqrt=true; Triton: tl.div_rn, tl.sqrt_rn; or list the instruction "
            "in the contract",
        ),
        Rule(
            "ftz",
            forbids="flushing subnormals to zero",
            why="subnormals are live in the contracts, and a flush changes the bits of small values",
            judged="the PTX modifier .ftz; in SASS alone .FTZ outside IEEE division, reciprocal and square root",
            cannot_know="whether subnormals occur at run time",
            remedy="CUDA: --ftz=false; Triton: its rsqrt, sqrt and libdevice functions flush, so write the instruction "
            "without .ftz as inline assembly, or list it in the contract",
        ),
        Rule(
            "local-memory",
            forbids="spills, local arrays and stack frames",
            why="they cost memory traffic, and a spill means that the launch plan was tuned for another register count",
            judged="LDL and STL in SASS and the cubin's stack and local bytes; for PTX alone, .local declarations",
            cannot_know="from PTX alone, whether ptxas will spill: it assigns the registers",
            remedy="use fewer values at a time, index arrays by constants only, or give the kernel more registers",
        ),
        Rule(
            "tensor-core",
            forbids="floating-point tensor-core instructions",
            why="their internal accumulation is not IEEE; only the exactness class kchain models it",
            judged="PTX mma, wmma, wgmma, tcgen05.mma and SASS *MMA, except the integer forms",
            cannot_know="nothing is missing",
            remedy="use FP32 arithmetic, or declare the contract as kchain",
        ),
        Rule(
            "unreadable",
            forbids="code that cannot be read, compiled, disassembled or paired",
            why="what was not read was not audited, and an audit is never silently partial",
            judged="errors of the compiler, of the disassembler and of the parsers",
            cannot_know="everything about that code",
            remedy="see the message",
        ),
    )
}

EXAMPLES = 3


@dataclass(frozen=True)
class Finding:
    """One rule broken in one function, with the first offending places."""

    rule: str
    verdict: Verdict
    function: str
    source: Literal["ptx", "sass", "file"]
    count: int
    examples: tuple[str, ...]
    note: str = ""

    @property
    def remedy(self) -> str:
        return RULES[self.rule].remedy

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "why": RULES[self.rule].why, "remedy": self.remedy}
