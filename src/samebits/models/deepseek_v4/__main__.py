"""``python -m samebits.models.deepseek_v4``: compare a model with itself and write what was found as JSON.

On a GPU one layer of the official size, embedding, head and logits included; on a CPU a small one unless asked otherwise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from samebits.models.deepseek_v4 import subject
from samebits.models.deepseek_v4.compare import compare_layer
from samebits.models.deepseek_v4.show import show

CONTRACTS = ("fast", "published")
ATTENTION = {
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
    "sliding": "sliding_attention",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything that must hold does, 1 otherwise."""
    options = _parser().parse_args(arguments)
    official = options.size == "official" or (options.size is None and options.device != "cpu")
    config = {**(subject.OFFICIAL if official else subject.SMALL), "layer_types": [ATTENTION[options.attention]]}
    batch, sequence = (options.batch or (4 if official else 2)), (options.sequence or (256 if official else 32))
    console = Console(width=160)
    found = []
    for contracts in options.contracts:
        comparison = compare_layer(
            contracts,
            batch=batch,
            sequence=sequence,
            config=config,
            backend=options.backend,
            device=options.device,
            rows=options.rows,
        )
        show(comparison, console)
        found.append(comparison.to_json())
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    return 0 if all(entry["passed"] for entry in found) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="samebits.models.deepseek_v4", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file, a list with one comparison for each of --contracts")
    parser.add_argument(
        "--contracts", type=lambda text: text.split(","), default=list(CONTRACTS), help="fast,published"
    )
    parser.add_argument("--size", choices=("official", "small"))
    parser.add_argument("--attention", choices=tuple(ATTENTION), default="csa")
    parser.add_argument("--batch", type=int, help="default 4 (official) or 2")
    parser.add_argument("--sequence", type=int, help="default 256 (official) or 32")
    parser.add_argument("--rows", type=int, default=8, help="how many rows run alone")
    parser.add_argument("--backend")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
