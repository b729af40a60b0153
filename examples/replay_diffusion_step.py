"""Replay a diffusion step bit for bit: MiniMax-H3 in diffusers' own denoising loop, with our operators patched in.

    python examples/replay_diffusion_step.py [sealed.json]

The model is small and its weights are random. A record of all that goes in and comes out at every step is left in ``sealed.json``;
where that file exists, it must come out again. The same from a terminal, at any size, with distances from FP64 and a report:

    samebits replay minimax-h3 --stage generation --blocks 2 --steps 3 --out replay
"""

import json
import sys
from pathlib import Path

import samebits
from samebits.models.minimax_h3 import peer, sealed
from samebits.models.minimax_h3.generation import ALONE, Beside, Request, generate, pipeline_class
from samebits.models.minimax_h3.generation_process import Order, elsewhere
from samebits.models.minimax_h3.model_source import Recipe


def main() -> None:
    try:
        pipeline_class()
    except ImportError as error:
        raise SystemExit(f"this example runs diffusers: {error}; pip install 'samebits[models]'") from None
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    earlier = sealed.read(kept) if kept is not None and kept.exists() else None
    recipe, request = Recipe(width=16, blocks=1), Request("mini", steps=2)
    source = recipe.build()
    weights, model = source.digest(), source.model
    contracts: dict[str, str] = {}

    def record(beside: Beside = ALONE) -> sealed.Sealed:
        return sealed.seal(generate(model, request, beside), request, weights, contracts, peer.version())

    theirs = record()  # the class as it is
    contracts |= samebits.patch(model).contracts
    ours = record()
    print(f"{len(samebits.patched(model).sites)} call sites patched, beside {peer.version()}\n")
    for at, step in enumerate(ours["steps"]):
        print(f"step {at}, t = {[round(t, 3) for t in step['timesteps']]}: velocity {step['video velocity'][:16]}...")

    runs = {"beside another sequence in the batch": record(Beside(1, 1))}
    (runs["in another process"],) = elsewhere(Order(recipe, request, [ALONE], contracts, None))
    if earlier is not None:
        runs["beside the earlier record"] = earlier
    found = {name: sealed.first_difference(ours, made) for name, made in runs.items()}
    for name, differs in found.items():
        print(f"{name}: {'the same bits at every step' if differs is None else f'OTHER BITS from {differs}'}")
    contents = [{part: made[part] for part in ("noise", "steps", "result")} for made in (ours, theirs)]
    print(f"beside the class unpatched, the first that differs: {sealed.first_difference(*contents) or 'nothing'}")
    if kept is not None and earlier is None:
        kept.write_text(json.dumps(ours, indent=1) + "\n")
    raise SystemExit(0 if set(found.values()) == {None} else 1)


if __name__ == "__main__":
    main()
