"""Replay a diffusion step bit for bit: the conditioning of MiniMax-H3, by our operators and by the installed diffusers.

    python examples/replay_diffusion_step.py

The same from a terminal, with gradients and a report; the released weights (`samebits prepare minimax-h3`) go in as --weights:

    samebits replay minimax-h3 --stage conditioning --backward --out replay
"""

from samebits.models.minimax_h3 import geometry, peer, weights
from samebits.models.minimax_h3.measure import Agreement
from samebits.models.minimax_h3.replay import replay

WIDTH = 64  # of the hidden states; the model's own is geometry.OFFICIAL.hidden_size


def bits(agreement: Agreement) -> str:
    return "same bits" if agreement.same else f"{agreement.differing} of {agreement.elements} differ"


def main() -> None:
    why = peer.missing()
    if why is not None:  # its formulas in plain PyTorch take its place: the comparison runs, but proves less
        print(f"diffusers cannot be used: {why}")
    drawn = weights.synthetic(0, geometry.reduced(WIDTH))  # the same bits on every machine
    found, again = (replay(drawn, timesteps=[2], seq_lens=[5]) for _ in range(2))
    (case,), (repeated,) = found.cases, again.cases
    print(f"{case.title} (timesteps, rows), beside {found.peer}\n")

    print(f"{'stage':20} {'chained':16} {'on its inputs':16} its own rows that vary with the batch")
    for stage in case.stages:
        varying = f"{stage.peer_rows.varying} of {stage.peer_rows.checked}"
        print(f"{stage.name:20} {bits(stage.chained):16} {bits(stage.isolated):16} {varying}")
    print(f"\nthe chain first leaves it at: {case.first_drift or 'no stage'}")
    same = [stage.digest for stage in case.stages] == [stage.digest for stage in repeated.stages]
    print(f"a second replay: {'the same bits' if same else 'OTHER BITS'}")
    for claim in found.checks:
        print(f"{'holds' if claim.passed else 'BROKEN'}: {claim.name}")
    raise SystemExit(0 if found.passed and same else 1)


if __name__ == "__main__":
    main()
