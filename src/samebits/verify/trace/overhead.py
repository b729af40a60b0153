"""What a trace costs: a step of a model with and without it, in turn, on the device at hand.

    python -m samebits.verify.trace.overhead --model minimax-h3 --sequence 264 3160 16384 --backward --out overhead.jsonl

prints one JSON object for each length; ``--help`` says what else can be chosen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samebits import environment
from samebits.cli.errors import UserError
from samebits.exact.compare import same_bits
from samebits.verify.trace.events import Event
from samebits.verify.trace.nested import leaves
from samebits.verify.trace.session import trace

ROUNDS = 7


@dataclass(frozen=True)
class Overhead:
    """Medians over the rounds, in milliseconds, each with the device drained."""

    plain_ms: float
    traced_ms: float
    """A run inside an open trace: hooks and digests, without opening it and reading it back."""
    close_ms: float
    """Reading the digests back and making the events, once per trace."""
    ratio: float
    """Traced over plain, of the same round; 1.1 is the target on a GPU for a block of a real model's size."""
    calls: int
    digested_bytes: int
    """Bytes of all tensors that were recorded in one run, as often as they were; parameters by themselves are not among them."""
    read_bytes: int
    """Bytes that were read for that in the timed run: a tensor that is known is not read again."""
    rounds: int
    unchanged: bool
    """Whether the traced run returned the bits of the plain one."""


def measure(run: Callable[[], Any], model: nn.Module, rounds: int = ROUNDS, **options: Any) -> Overhead:
    """Time ``run()``, which calls ``model``, plain and traced. ``options`` are those of :func:`samebits.trace`."""
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    expected = _tensors(run())
    with trace(model, **options):
        run()  # keys, first-use probes and allocations
    plain, traced, closed = [], [], []
    unchanged = True
    for _ in range(rounds):
        plain.append(_timed(run, device)[0])
        recording = trace(model, **options)
        with recording:
            run()  # the parameters are read here
            before = recording.bytes_read
            seconds, result = _timed(run, device)
            traced.append(seconds)
            begin = time.perf_counter()
        closed.append(time.perf_counter() - begin)
        found = _tensors(result)
        unchanged = unchanged and all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    second = [event for event in recording.trace.events if event.kind != "parameter"]
    second = second[len(second) // 2 :]
    return Overhead(
        plain_ms=1e3 * statistics.median(plain),
        traced_ms=1e3 * statistics.median(traced),
        close_ms=1e3 * statistics.median(closed),
        ratio=statistics.median(t / p for t, p in zip(traced, plain, strict=True)),
        calls=len(second),
        digested_bytes=sum(_bytes(event) for event in second),
        read_bytes=recording.bytes_read - before,
        rounds=rounds,
        unchanged=unchanged,
    )


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    _drain(device)
    begin = time.perf_counter()
    result = run()
    _drain(device)
    return time.perf_counter() - begin, result


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tensors(result: Any) -> list[Tensor]:
    return [t.detach().clone() for _, t in leaves(("output", result)).tensors]


def _bytes(event: Event) -> int:
    total = 0
    for record in (*event.inputs, *event.outputs):
        count = 1
        for size in record.shape:
            count *= size
        total += count * getattr(torch, record.dtype).itemsize
    return total


class _Subject:
    """A model with our operators, and a step of it."""

    def __init__(self, title: str, model: nn.Module, run: Callable[[], Any]) -> None:
        self.title, self.model, self.run = title, model, run


def _deepseek_v4(given: argparse.Namespace, sequence: int) -> _Subject:
    """The layer; its parameters have no gradient."""
    from samebits.models.deepseek_v4 import patching, subject

    if given.backward:
        raise UserError("--backward: this model's parameters have no gradient; it is for minimax-h3")
    config = subject.OFFICIAL if given.official else subject.SMALL
    made = subject.causal_lm(given.batch, sequence, device=given.device, config=config)
    patching.patch(made.model, given.contracts)

    def run() -> Tensor:
        with torch.no_grad():
            return made()

    return _Subject(made.title, made.model, run)


def _minimax_h3(given: argparse.Namespace, sequence: int) -> _Subject:
    """The block, at the released width unless ``--small`` says otherwise. With a backward, what it returns and all gradients."""
    import samebits
    from samebits.models.minimax_h3 import block_bench
    from samebits.models.minimax_h3.geometry import MODALITIES, OFFICIAL, reduced

    geometry = reduced(16) if given.small else OFFICIAL
    made = block_bench.subject(sequence, geometry, torch.device(given.device))
    segments = samebits.segments(made.index, MODALITIES * block_bench.TIMESTEPS)
    block, leaves_ = made.ours, made.leaves(made.ours)

    def forward() -> Any:
        with torch.no_grad():
            return block(made.hidden, made.temb, segments, made.rotary)

    def both() -> Any:
        for leaf in leaves_:
            leaf.grad = None
        result = block(made.hidden, made.temb, segments, made.rotary)
        result.backward(made.upstream)
        return result, [leaf.grad for leaf in leaves_]

    title = f"MiniMax-H3 block, {geometry}, {sequence} rows, {'forward and backward' if given.backward else 'forward'}"
    return _Subject(title, block, both if given.backward else forward)


MODELS = {"deepseek-v4": _deepseek_v4, "minimax-h3": _minimax_h3}


def main(arguments: Sequence[str] | None = None) -> None:
    """A DeepSeek-V4 layer or a MiniMax-H3 block with our operators, at the size that the arguments choose."""
    parser = argparse.ArgumentParser(prog="python -m samebits.verify.trace.overhead", description=main.__doc__)
    parser.add_argument("--model", choices=MODELS, default="deepseek-v4")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--official", action="store_true", help="deepseek-v4: a layer of the official size; needs a large GPU"
    )
    parser.add_argument("--small", action="store_true", help="minimax-h3: a width that a CPU runs")
    parser.add_argument("--batch", type=int, default=2, help="of deepseek-v4")
    parser.add_argument("--sequence", type=int, nargs="+", default=[32], help="one or more lengths")
    parser.add_argument("--backward", action="store_true", help="of minimax-h3: forward and backward")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rows", type=int, default=0, help="axes that count rows, for row digests")
    parser.add_argument("--no-reuse", action="store_true", help="read every tensor at every call")
    parser.add_argument(
        "--passed-over", action="store_true", help="run modules for the trace alone too, see samebits.trace"
    )
    parser.add_argument("--contracts", default="fast", help="of deepseek-v4's operators, as samebits.patch takes them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the same lines, left in a file")
    given = parser.parse_args(arguments)
    stamp = environment.collect().to_json()
    lines = []
    for sequence in given.sequence:
        made = MODELS[given.model](given, sequence)
        options = {"rows": given.rows, "reuse": not given.no_reuse, "passed_over": given.passed_over}
        found = measure(made.run, made.model, given.rounds, **options)
        head = {"kind": "samebits-trace-overhead", "model": made.title, "options": options}
        line = {**head, **asdict(found), "environment": stamp}
        lines.append(json.dumps(line))
        print(lines[-1], flush=True)
        del made
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"samebits.verify.trace.overhead: {error}") from error
