"""Holds a whole MiniMax-H3 transformer with our operators beside itself without them.

python -m samebits.models.minimax_h3 --device cuda --released --layers 2 --layout tiny --out model.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from samebits.models.minimax_h3.compare import compare_model
from samebits.models.minimax_h3.layouts import NAMED
from samebits.models.minimax_h3.subject import RELEASED, subject


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--released", action="store_true", help="the released sizes; else small ones")
    parser.add_argument("--layers", type=int, default=2, help="blocks, of 50 in the released model")
    parser.add_argument("--layout", default="mini", choices=tuple(NAMED))
    parser.add_argument("--batch", type=int, default=2, help="sequences, at least 2")
    parser.add_argument("--backend", default=None, help="of our operators")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    given = parser.parse_args()
    if given.batch < 2 or given.layers < 1:
        parser.error("--batch must be at least 2, --layers at least 1")
    sizes = RELEASED if given.released else {}
    model = subject(given.layout, given.batch, device=given.device, num_layers=given.layers, **sizes)
    found = compare_model(model, given.backend)
    print(f"{found.sites} call sites, {found.release}: {', '.join(found.operators)}")
    print(f"{found.equal} of {found.elements} outputs have the class's bits; largest distance {found.distance:.3g}")
    print(f"unpatched, {found.peer_varying} outputs have other bits in the batch than alone")
    for check in found.checks:
        print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}  {check.detail}")
    if given.out is not None:
        given.out.write_text(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
    return 0 if found.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
