"""What a trace costs: a model's forward with and without it, in turn, on the device at hand.

``python -m samebits.verify.trace.overhead`` prints one JSON object; ``--help`` says what can be chosen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits import environment
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
    """Traced over plain; 1.1 is the target on a GPU for a block of a real model's size."""
    calls: int
    digested_bytes: int
    """Bytes that were read for digests in one run; parameters, which are read once per version, are not among them."""
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
        ratio=statistics.median(traced) / statistics.median(plain),
        calls=len(second),
        digested_bytes=sum(_bytes(event) for event in second),
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


def main(arguments: Sequence[str] | None = None) -> None:
    """The DeepSeek-V4 layer with our operators, at the size that the arguments choose."""
    parser = argparse.ArgumentParser(prog="python -m samebits.verify.trace.overhead", description=main.__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--official", action="store_true", help="one layer of the official size; needs a large GPU")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rows", type=int, default=0, help="axes that count rows, for row digests")
    parser.add_argument("--contracts", default="fast", help="of the operators, as samebits.patch takes them")
    given = parser.parse_args(arguments)

    from samebits.models.deepseek_v4 import patching, subject

    config = subject.OFFICIAL if given.official else subject.SMALL
    made = subject.causal_lm(given.batch, given.sequence, device=given.device, config=config)
    patching.patch(made.model, given.contracts)
    with torch.no_grad():
        found = measure(made, made.model, given.rounds, rows=given.rows)
    stamp = environment.collect().to_json()
    print(json.dumps({"kind": "samebits-trace-overhead", "model": made.title, **asdict(found), "environment": stamp}))


if __name__ == "__main__":
    main()
