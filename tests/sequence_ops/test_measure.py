"""The judgements of ``attention``'s measuring program, without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.timing import Failure, Sample
from samebits.sequence_ops.attention import measure
from samebits.sequence_ops.attention.peers import PEERS
from samebits.sequence_ops.attention.targets import CUDNN, FLASH


def drawn(length: int) -> list[Tensor]:
    return measure.drawn(length, torch.device("cpu"), 2, 64)[:3]


def test_ours_is_invariant() -> None:
    found = measure.invariance(measure.ours("cudnn"), *drawn(40))
    assert len(found) == 5
    assert all(found.values()), found


def test_what_depends_on_its_neighbours_is_found() -> None:
    """An attention that adds the number of queries and of batch entries to its result."""

    def leaning(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return measure.ours("cudnn")(q, k, v) + q.shape[0] + q.shape[1] + 16 * q.shape[2]

    found = measure.invariance(leaning, *drawn(40))
    assert found == {name: name == "again" for name in found}


def test_a_peer_takes_our_layout() -> None:
    q, k, v = drawn(20)
    theirs = PEERS["math"](q, k[:, :, :1], v[:, :, :1])
    ours = measure.ours("fa2")(q, k[:, :, :1], v[:, :, :1])
    assert theirs.shape == ours.shape
    assert (theirs.float() - ours.float()).abs().max() < 2e-2


def test_a_line_has_speed_ratios_and_targets() -> None:
    def sample(us: float) -> Sample:
        return Sample(us, us, us, 15, "graph", 5.0, 0)

    found = {"cudnn": sample(100.0), "fa2": Failure("no room"), CUDNN: sample(90.0), FLASH: sample(150.0)}
    good, bad = measure.rows_of("fwd", 3160, found)
    assert good["tflops"] == 4 * 3160 * 3160 * 56 * 128 / 100e-6 * 1e-12
    assert good["peers"][FLASH]["ratio"] == 1.5
    assert good["targets"] == {"target >= 1.3 x FlashAttention-2": 1.5, "stretch >= 0.95 x cuDNN": 0.9}
    assert bad["failed"] == "no room"
