"""Generations in a process of their own: ``python -m samebits.models.minimax_h3.generation_process`` reads an order, as
JSON, from its input and writes the sealed records to its output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samebits.models.minimax_h3 import patching, peer
from samebits.models.minimax_h3.generation import Beside, Request, generate
from samebits.models.minimax_h3.model_source import Recipe
from samebits.models.minimax_h3.record import exact_matmul
from samebits.models.minimax_h3.sealed import Sealed, seal


@dataclass(frozen=True)
class Order:
    recipe: Recipe
    request: Request
    beside: Sequence[Beside]
    """One generation each."""
    contracts: Mapping[str, str]
    backend: str | None


def elsewhere(order: Order) -> list[Sealed]:
    """The sealed records of the patched model in a new process of this interpreter.

    Raises:
        ChildProcessError: it failed; the message is the end of what it said.
    """
    command = [sys.executable, "-m", "samebits.models.minimax_h3.generation_process"]
    ran = subprocess.run(command, input=json.dumps(asdict(order)), capture_output=True, text=True, check=False)
    if ran.returncode:
        said = ran.stderr.strip().splitlines() or ["nothing"]
        raise ChildProcessError(f"the generation in another process failed: {said[-1]}")
    found: list[Sealed] = json.loads(ran.stdout)
    return found


def fulfil(order: Order) -> list[Sealed]:
    source = order.recipe.build()
    contracts = patching.patch(source.model, order.contracts, backend=order.backend).contracts
    weights = source.digest()
    with exact_matmul():
        made = [generate(source.model, order.request, beside) for beside in order.beside]
    return [seal(one, order.request, weights, contracts, peer.version()) for one in made]


def _read(given: dict[str, Any]) -> Order:
    return Order(
        recipe=Recipe(**given["recipe"]),
        request=Request(**given["request"]),
        beside=[Beside(**one) for one in given["beside"]],
        contracts=given["contracts"],
        backend=given["backend"],
    )


if __name__ == "__main__":
    json.dump(fulfil(_read(json.load(sys.stdin))), sys.stdout)
