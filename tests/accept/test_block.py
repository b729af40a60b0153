"""What a block records, and in what order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebits.accept import LayerContract, ReferenceProvider, integer
from samebits.accept.block import boundary_names, is_row, run_block
from samebits.accept.operators import OperatorProvider
from samebits.accept.provider import METHODS, check_capability
from samebits.accept.trace import Trace, compare, first_divergence
from samebits.exact.bits import digest

PARAMETERS = {"d_gamma", "d_controller_weight", "d_alpha_pre", "d_alpha_post", "d_alpha_res", "d_bias"}


def trace_of(rows: int = 2, provider: Any = None, **modes: Any) -> Trace:
    return run_block(provider or ReferenceProvider(), integer.batch(rows, LayerContract(hidden=16, **modes)))


def test_32_boundaries_in_the_published_order() -> None:
    trace = trace_of()
    assert trace.names() == boundary_names(mixer_frozen=False) and len(trace) == 32
    assert trace.names()[:11] == (
        *("controller.p", "controller.r", "controller.h", "split.pre", "split.post", "split.c", "pre.hidden"),
        *("norm.normalized", "norm.residual", "post.r_new", "bwd.dy_sublayer"),
    )
    assert trace.names()[-1] == "r_new"


def test_27_boundaries_with_a_frozen_mixer_and_its_gradients_are_none() -> None:
    trace = trace_of(trainability="mixer-frozen")
    assert trace.names() == boundary_names(mixer_frozen=True) and len(trace) == 27
    assert set(boundary_names(False)) - set(trace.names()) == {f"grad.{key}" for key in PARAMETERS - {"d_gamma"}}
    assert trace.notes["trainability"] == "mixer-frozen"
    batch = integer.batch(2, LayerContract(hidden=16, trainability="mixer-frozen"))
    provider = ReferenceProvider()
    _, _, post, c, saved = provider.mhc_pre_fwd(batch, provider)
    d_hidden, zeros = torch.ones(2, 16), torch.zeros_like
    grads = provider.mhc_pre_bwd(d_hidden, zeros(post), zeros(c), batch, saved, provider)
    assert (
        grads.d_controller_weight
        is grads.d_bias
        is grads.d_alpha_pre
        is grads.d_alpha_post
        is grads.d_alpha_res
        is None
    )
    full = trace_of()
    same = [name for name in trace.names() if trace[name].digest == full[name].digest]
    assert same == list(trace.names())  # both legs of the streams' gradient are still there


@pytest.mark.parametrize("fusion", ["unfused", "fused-pre-norm"])
@pytest.mark.parametrize("form", ["composed", "fused"])
def test_every_form_and_mode_gives_the_same_bytes(fusion: Any, form: Any) -> None:
    provider = OperatorProvider("reference", form=form)
    trace = trace_of(3, provider, fusion_mode=fusion)
    assert trace.digests() == trace_of(3).digests()
    assert trace.notes["fusion_mode"] == fusion and trace.notes["provenance"]["form"] == form


def test_streams_shared_names_and_rows() -> None:
    trace = trace_of(3)
    for stream in range(4):
        assert digest(trace["bwd.d_r_old"].tensor[:, stream]) == trace[f"bwd.d_stream{stream}"].digest
    for key in ("d_r_old", "dy_sublayer", "d_hidden", "d_gamma", "d_c", "d_post"):
        assert trace[f"grad.{key}"].digest == trace[f"bwd.{key}"].digest
    assert trace["r_new"].digest == trace["post.r_new"].digest
    for record in trace:
        assert record.rows == is_row(record.name) == (record.name.split(".")[-1] not in PARAMETERS)
        assert not record.rows or record.shape[0] == 3
    narrow = {record.name for record in trace if record.dtype == "bfloat16"}
    assert narrow == {"pre.hidden", "norm.normalized", "norm.residual", "post.r_new", "r_new"}


def test_notes_say_how_and_with_what() -> None:
    notes = trace_of().notes
    batch = integer.batch(2, LayerContract(hidden=16))
    assert notes["weight_fingerprint"] == batch.seal and notes["contract_fingerprint"] == batch.contract.fingerprint()
    assert notes["provenance"]["numeric_profile"] == "oracle-fp32-mhc-v1"
    for key in ("reductions", "fma", "controller_rms", "norm_rms", "downcasts", "zero_row"):
        assert notes[key]


def test_every_method_of_the_interface_is_there() -> None:
    for provider in (ReferenceProvider(), OperatorProvider("cuda")):
        assert [name for name in METHODS if not callable(getattr(provider, name, None))] == []


@pytest.mark.parametrize(
    ("modes", "rows", "named"),
    [
        ({"placement": "tp-sharded"}, 2, "placements 'tp-sharded'"),
        ({"numeric_profile": "mhc-tree256"}, 2, "numeric profile 'oracle-fp32-mhc-v1', the contract is 'mhc-tree256'"),
    ],
)
def test_what_is_not_declared_is_refused(modes: Any, rows: int, named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        check_capability(ReferenceProvider(), LayerContract(hidden=16, **modes), rows)


def test_first_divergence_is_by_name_or_hash_and_comparison_goes_both_ways() -> None:
    def trace(**tensors: Any) -> Trace:
        made = Trace(torch.device("cpu"))
        for name, values in tensors.items():
            made.add(name, torch.tensor(values))
        return made

    one = trace(a=[1.0], b=[2.0], c=[0.0])
    assert first_divergence(one, trace(a=[1.0], b=[2.0], c=[0.0])) is None
    assert first_divergence(one, trace(a=[1.0], b=[2.5], c=[0.0])) == ("b", "b")
    assert first_divergence(one, trace(a=[1.0], c=[0.0])) == ("b", "c")
    assert first_divergence(one, trace(a=[1.0], b=[2.0])) == ("c", None)
    found = {b.name: b.verdict for b in compare(one, trace(a=[1.0], c=[-0.0], d=[1.0]))}
    assert found == {"a": "same", "b": "missing", "c": "differs", "d": "extra"}
    with pytest.raises(ValueError, match="twice"):
        one.add("a", torch.ones(1))
