"""A kernel is audited once, under its owner, by the contracts of all operators that launch it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from audit.planted_triton import scale_add

from samebits import catalogue, registry
from samebits.audit import listing
from samebits.audit.build import Build
from samebits.audit.listing import Job
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.triton_build import TritonKernel

FOLD = CudaKernel("h_aggregate", "fold")
Listed = dict[str, tuple[Build, ...]]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listed]:
    """What each operator's CUDA backend lists; it has no other."""
    found: Listed = {}

    def operator(name: str) -> SimpleNamespace:
        return SimpleNamespace(backend=lambda backend: SimpleNamespace(builds=lambda: found[name]))

    def spec(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, backends=[SimpleNamespace(name="cuda")], contract=real(name).contract)

    real = registry.spec
    monkeypatch.setattr(registry, "names", lambda: tuple(found))
    monkeypatch.setattr(registry, "operator", operator)
    monkeypatch.setattr(registry, "spec", spec)
    monkeypatch.setattr(catalogue, "of_sequences", lambda: ())
    listing.everything.cache_clear()
    yield found
    listing.everything.cache_clear()


def test_a_lent_kernel_is_listed_once_and_must_keep_every_contract(listed: Listed) -> None:
    listed["h_aggregate"] = (Build(FOLD, ("tree256",)),)
    listed["mhc_pre"] = (Build(FOLD, ("fast",)), Build(CudaKernel("mhc_pre", "collapse"), ("fast",)))
    listed["hyper_head"] = (Build(FOLD, ("fast",)), Build(CudaKernel("mhc_pre", "collapse"), ("ascending",)))
    fold, collapse = listing.everything()
    assert isinstance(fold, Job) and isinstance(collapse, Job)
    assert (fold.op, fold.contracts) == ("h_aggregate", ("tree256", "hyper_head fast", "mhc_pre fast"))
    assert fold.limits.fma == "forbid", "h_aggregate forbids what mhc_pre allows"
    assert (collapse.op, collapse.contracts) == ("mhc_pre", ("fast", "hyper_head ascending"))
    assert collapse.limits.fma == "explicit" and "tensor-core" not in collapse.limits.off
    assert listing.jobs_of(["h_aggregate"]) == (fold,)
    assert listing.jobs_of(["hyper_head"]) == (), "no kernel of its own is no fault"
    assert listing.lenders("hyper_head") == ("h_aggregate", "mhc_pre")
    assert listing.lenders("h_aggregate") == ()


def test_a_kernel_that_only_others_launch_is_listed_too(listed: Listed) -> None:
    listed["h_aggregate"] = (Build(FOLD, ("ascending",)),)
    other = CudaKernel("h_aggregate", "fold", (("WIDE", 1),))
    listed["mhc_pre"] = (Build(other, ("ascending",)),)
    assert [job.contracts for job in listing.jobs_of(["h_aggregate"]) if isinstance(job, Job)] == [
        ("ascending",),
        ("mhc_pre ascending",),
    ]


def test_a_triton_kernel_from_elsewhere_is_an_error(listed: Listed) -> None:
    signature = (("x", "*bf16"), ("y", "*fp32"), ("n", "i32"), ("BLOCK", "constexpr"))
    listed["h_aggregate"] = (Build(TritonKernel(scale_add, signature, (("BLOCK", 256),)), ("ascending",)),)
    (one,) = listing.everything()
    assert not isinstance(one, Job) and "in no operator's folder: audit.planted_triton" in one.why


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(ValueError, match="no operator named"):
        listing.jobs_of(["nobody"])


def test_the_operators_that_lend_kernels() -> None:
    """The composites have most of their kernels from others, who own them."""
    lent = {op: set(listing.lenders(op)) for op in registry.names()}
    assert lent["mhc_pre"] >= {"fp32_gemm_rms", "h_aggregate"}
    assert lent["mhc_pre_norm"] >= {"mhc_pre", "rmsnorm_residual"}
    assert lent["h_aggregate"] == lent["rmsnorm_residual"] == set()
