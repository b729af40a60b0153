"""What a declaration of peers may say, and what is refused because it would leave something out unseen."""

from __future__ import annotations

import sys

import pytest
import torch

from samebits import registry
from samebits.bench import modes, peers
from samebits.bench.modes import Mode
from samebits.bench.peers import Peer
from samebits.bench.work import LeftOut
from samebits.compare.bitwise import Tally


def norm(**fields):
    return Peer("one", lambda x, gamma, eps: (x, x), **fields)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ((norm(outputs=("z",)),), r"outputs names \['z'\], known are \['residual', 'y'\]"),
        ((norm(outputs=()),), "nothing to compare"),
        ((norm(gradients=("eps",)),), r"gradients names \['eps'\]"),
        ((norm(cast=(("beta", "bfloat16"),)),), r"cast names \['beta'\]"),
        ((norm(), norm()), "two have the same name"),
        ((norm(modes=(Mode("a"), Mode("a"))),), "two modes have the same name"),
    ],
)
def test_a_typo_is_refused(declared, words):
    with pytest.raises(ValueError, match=words):
        peers.validated("rmsnorm_residual", declared)


def test_what_a_peer_gives():
    spec = registry.spec("rmsnorm_residual")
    assert norm().results(spec) == ("y", "residual") and norm().leaves(spec) == ("x", "gamma")
    part = norm(outputs=("y",), gradients=("gamma",))
    assert part.results(spec) == ("y",) and part.leaves(spec) == ("gamma",)
    assert norm(gradients=()).leaves(spec) == ()


def test_why_a_peer_cannot_run(monkeypatch):
    assert norm().unavailable("cpu") is None
    absent = norm(needs=("torch", "no_such_library.part"), cuda=True)
    assert (
        absent.unavailable("cpu")
        == absent.unavailable("cuda")
        == "ModuleNotFoundError: No module named 'no_such_library'"
    )
    monkeypatch.setitem(sys.modules, "no_such_library", torch)  # a stub in its place, as some peers need one
    assert absent.unavailable("cuda") is None and "GPU" in absent.unavailable("cpu")


def test_every_declared_switch_is_one_that_torch_has():
    """A mode whose switch torch does not know would compare the default twice. ``apply`` sets it, so it is set back."""
    for path in modes.SWITCHES:
        owner = torch.backends.cuda.matmul
        before = getattr(owner, path.rpartition(".")[2])
        Mode("same", flags=((path, before),)).apply()
        assert getattr(owner, path.rpartition(".")[2]) == before
    with pytest.raises(ValueError, match="no switch of torch"):
        Mode("typo", flags=(("torch.backends.cuda.matmul.nothing", True),)).apply()
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        Mode("absent", enable="no_such_library:enable").apply()


def test_modes_differ_from_the_default_and_from_each_other():
    for declared in (modes.FP32_GEMM, modes.BF16_GEMM):
        told = {(mode.environment, mode.flags, mode.deterministic, mode.enable) for mode in declared}
        assert len(told) == len(declared) and ((), (), False, "") not in told
    assert set(modes.VARIABLES) >= {"CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"}


def test_the_benchmark_leaves_out_what_cannot_run():
    from samebits.bench import tensors, work
    from samebits.bench.case import Case

    op = registry.operator("rmsnorm_residual")
    case = Case(op.name, "bwd", 3, (("D", 8),))
    cpu = torch.device("cpu")
    given = work.Given(tensors.forward_inputs(op.spec, case, cpu), tensors.upstream(op.spec, case, cpu))
    for peer, words in (
        (norm(cuda=True), "GPU"),
        (norm(gradients=()), "forward alone"),
        (norm(needs=("nope",)), "'nope'"),
    ):
        with pytest.raises(LeftOut, match=words):
            work.peer(op, case, given, peer).prepare()


def test_no_comparison_is_no_pass():
    tally = Tally()
    assert tally.passed is None
    tally.compare("one against one", "y", torch.ones(2), torch.ones(2))
    assert tally.passed is True
    tally.compare("one against two", "y", torch.ones(2), torch.tensor([1.0, 2.0]))
    tally.compare("two against three", "y", torch.ones(2), torch.ones(3))
    assert tally.passed is False and (tally.compared, tally.failed) == (3, 2)
    assert "row 1" in tally.first_failures[0] and "shape (2,) against (3,)" in tally.first_failures[1]
