"""Where the contracts have the bits of torch's libraries: differing elements, over dtypes, sizes, masks and lengths.

    python -m samebits.sequence_ops.attention.libraries --out benchmarks/results/attention_libraries.json

Exit code 0: everything was compared (agreement is measured, not promised), 1: a call failed, and its case says how, 2: wrong use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from samebits import environment
from samebits.checks import DTYPES
from samebits.exact.bits import bits
from samebits.sequence_ops.attention import api
from samebits.sequence_ops.attention.peers import sdpa

KIND = "samebits-attention-libraries"
LIBRARIES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
"""A contract, and whose bits it has."""
HEADS = 56
KEY_HEADS = (56, 8)
LENGTHS = ((16, 16), (264, 264), (925, 925), (3160, 3160), (1, 925), (8, 925), (925, 3160))
"""Queries and keys."""
LONG = 16384
"""In BF16 at D = 128 alone, each head with its own keys."""

Library = Callable[[SDPBackend, Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Case:
    dtype: str
    head_dim: int
    causal: bool
    heads: int
    kv_heads: int
    queries: int
    keys: int

    def drawn(self, device: torch.device) -> list[Tensor]:
        """q, k and v: random numbers of the device."""
        generator = torch.Generator(device).manual_seed(self.queries + self.head_dim)
        shapes = ((self.queries, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads))
        return [
            torch.randn(1, *shape, self.head_dim, generator=generator, device=device).to(DTYPES[self.dtype])
            for shape in shapes
        ]

    def to_json(self) -> dict[str, Any]:
        head = {"dtype": self.dtype, "D": self.head_dim, "causal": self.causal}
        return head | {"H": self.heads, "Hk": self.kv_heads, "Sq": self.queries, "Sk": self.keys}


def cases() -> Iterator[Case]:
    """Causal where there are as many queries as keys: elsewhere torch aligns the mask at the top left."""
    for dtype in ("bfloat16", "float16"):
        for head_dim in (128, 64):
            for causal in (False, True):
                for kv_heads in KEY_HEADS:
                    lengths = [pair for pair in LENGTHS if not causal or pair[0] == pair[1]]
                    if dtype == "bfloat16" and head_dim == 128 and kv_heads == HEADS:
                        lengths.append((LONG, LONG))
                    for queries, keys in lengths:
                        yield Case(dtype, head_dim, causal, HEADS, kv_heads, queries, keys)


@torch.no_grad()
def compare(case: Case, device: torch.device, library: Library = sdpa) -> dict[str, Any]:
    """Elements of out that differ, by contract; what the call said where it failed."""
    q, k, v = case.drawn(device)
    found: dict[str, Any] = {}
    for contract, backend in LIBRARIES.items():
        try:
            ours, _ = api.attention(q, k, v, causal=case.causal, contract=contract)
            theirs = library(backend, q, k, v, case.causal)
            found[contract] = int((bits(ours) != bits(theirs.contiguous())).sum())
        except (RuntimeError, ValueError) as error:
            found[contract] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return case.to_json() | found | {"elements": q.numel()}


def record(
    todo: Iterable[Case], device: torch.device, library: Library = sdpa, say: Callable[[str], None] = print
) -> dict[str, Any]:
    here = environment.collect()
    entries = []
    for case in todo:
        entries.append(compare(case, device, library))
        say(json.dumps(entries[-1]))
    return {
        "kind": KIND,
        "commit": here.commit,
        "device": here.gpu,
        "torch": here.torch,
        "what": "elements of out that differ from torch's CUDNN_ATTENTION (contract cudnn) and FLASH_ATTENTION (fa2)",
        "cases": entries,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the record, as JSON")
    given = parser.parse_args(words)
    if not given.out.parent.is_dir():
        parser.error(f"--out {given.out}: there is no folder {given.out.parent}")
    if not torch.cuda.is_available():
        parser.error("cuDNN and FlashAttention-2 run on an NVIDIA GPU alone, and none is visible to torch")
    made = record(cases(), torch.device("cuda"))
    given.out.write_text(json.dumps(made, indent=0) + "\n")
    failed = [case for case in made["cases"] if any(isinstance(case[contract], str) for contract in LIBRARIES)]
    print(f"{len(made['cases'])} cases, {len(failed)} with a call that failed: {given.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
