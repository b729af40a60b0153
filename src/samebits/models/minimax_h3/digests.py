"""Digests of what our operators make of block 0, every node and every gradient: the same on a GPU and on a laptop.

    python -m samebits.models.minimax_h3.digests --bits-of sm_90 --compare tests/golden/minimax_h3_block.sm_90.json

On a CPU and within ``samebits.bits_of`` the references give what the GPU gives, so that a GPU's digests can be foretold and
checked without one. Weights and rows are whole numbers scaled by powers of two, the same bits everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from samebits.exact.bits import canonical_nan, digest
from samebits.exact.elementary import ARCHITECTURES, bits_of
from samebits.models.minimax_h3 import block_backward, geometry, weights
from samebits.models.minimax_h3.block import BLOCK, make_block_case
from samebits.models.minimax_h3.candidate import Candidate

WIDTH, LAYOUT = 192, "tiny"
"""What the committed digests are of: the released proportions with two heads, 264 rows."""


def digests(width: int = WIDTH, layout: str = LAYOUT, seed: int = 0, device: str = "cpu") -> dict[str, str]:
    """``{"node/<name>" | "gradient/<leaf or node>": digest}``, the nodes one after the other as the block runs them."""
    where = torch.device(device)
    sizes = geometry.reduced(width)
    case = make_block_case(weights.synthetic(seed, sizes, block=True, device=where), layout, seed)
    rows = case.hidden.shape[1]

    def drawn(name: str) -> torch.Tensor:
        made = weights.draw(name, torch.float32, (rows, width), seed, where)
        return made.mul_(2.0 ** round(math.log2(width) / 2))[None].to(case.dtype)

    case = replace(case, hidden=drawn("hidden"))
    ours = Candidate(chain=BLOCK)
    history, gradients = block_backward.run(case, lambda one: block_backward.chained(one, ours), drawn("upstream"))
    nodes = {f"node/{name}/{at}": value for name, outputs in history.items() for at, value in enumerate(outputs)}
    named = nodes | {f"gradient/{name}": value for name, value in gradients.items()}
    return {name: digest(canonical_nan(value)) for name, value in named.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: written, or as stored; 1: something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=WIDTH, help="of the residual stream; 5376 is the released model")
    parser.add_argument("--layout", default=LAYOUT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bits-of", choices=ARCHITECTURES, help="on a CPU: the GPU whose bits are wanted")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--write", type=Path, metavar="FILE")
    asked.add_argument("--compare", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    with bits_of(given.bits_of) if given.bits_of else contextlib.nullcontext():
        found = digests(given.width, given.layout, device=given.device)
    if given.write:
        content = {"width": given.width, "layout": given.layout, "digests": found}
        given.write.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        print(f"{len(found)} digests: {given.write}")
        return 0
    stored = json.loads(given.compare.read_text())["digests"]
    wrong = sorted(name for name in stored.keys() | found.keys() if stored.get(name) != found.get(name))
    print("\n".join(f"{name} differs" for name in wrong) or f"all {len(found)} digests are as stored")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
