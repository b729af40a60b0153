"""The replay on a GPU, at the released width: there every stage with a promise has the peer's bits."""

from __future__ import annotations

import pytest
import torch

from samebits.models.minimax_h3 import geometry, replay, weights
from samebits.models.minimax_h3.candidate import Candidate

pytestmark = [pytest.mark.gpu, pytest.mark.big]


@pytest.fixture(scope="module")
def official():
    return weights.synthetic(0, geometry.OFFICIAL, device=torch.device("cuda"))


@pytest.mark.parametrize("layout", ["interleaved", "block"])
def test_the_chain_keeps_every_promise(official, layout):
    result = replay.replay(
        official, timesteps=[1, 3], seq_lens=[4, 257], layout=layout, candidate=Candidate(), with_backward=True
    )
    assert [check for check in result.checks if not check.passed] == []
    assert [stage.name for case in result.cases for stage in case.stages if stage.stand_in] == []
    for case in result.cases:
        promised = [stage.name for stage in case.stages if stage.promised]
        assert promised == ["timestep_sinusoid", "adaln_row_gather", "rmsnorm_modulated", "adaln_gate_residual"]
        assert case.first_drift == case.first_isolated_drift == "timestep_mlp"
