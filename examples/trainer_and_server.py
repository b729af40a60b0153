"""Find where my trainer and my server part: the same weights, a batch of eight prompts against one of them served alone.

    python examples/trainer_and_server.py [FOLDER]

Each side records its own trace, on its own machine if need be. The files are compared row by row:

    samebits drift trainer.trace server.trace --rows rows.json --html drift.html
"""

import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn

import samebits
from samebits.verify.drift import batch_rows, page, show

ROWS = batch_rows(8, 1, [(5, 0)])  # row 5 of the trainer's batch is the only row of the server's


class ServerNorm(nn.RMSNorm):
    """The server's own norm: the same formula, but the weight meets the scale first."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


def model(norm: type[nn.RMSNorm]) -> nn.Module:
    torch.manual_seed(0)  # both sides load the same checkpoint
    parts = OrderedDict(embed=nn.Embedding(100, 256), norm=norm(256, 1e-6), head=nn.Linear(256, 100))
    nn.init.normal_(parts["norm"].weight, 1, 0.3)  # with weights of one the order of products would not show
    return nn.Sequential(parts)


def record(norm: type[nn.RMSNorm], tokens: Tensor, out: Path) -> Path:
    run = model(norm)
    with samebits.trace(run, out, rows=True, tensors=True), torch.no_grad():  # tensors tell which element, and how far
        run(tokens)
    return out


def main(folder: Path) -> None:
    prompts = torch.arange(8)[:, None]  # one token each, as in a step of decoding
    trainer = record(nn.RMSNorm, prompts, folder / "trainer.trace")
    server = record(ServerNorm, prompts[5:6], folder / "server.trace")
    ROWS.write(folder / "rows.json")
    found = samebits.drift(trainer, server, ROWS)
    page.write(found, folder / "drift.html")
    print(*show.lines(found), f"page: {folder / 'drift.html'}", sep="\n")
    repaired = record(nn.RMSNorm, prompts[5:6], folder / "repaired.trace")
    left = samebits.drift(trainer, repaired, ROWS).first()
    print(f"with the trainer's norm: {'the same bits' if left is None else f'the next drift is {left.name}'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
