"""The speed table as data: a target that cannot be missed would be no target."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits import registry
from samebits.bench import results, show, targets


def _line(**changes):
    base = {
        "op": "h_aggregate", "contract": "ascending", "backend": "cuda", "direction": "fwd", "dtype": "bfloat16",
        "shape": {"T": 8192, "D": 4096}, "us": 84.0, "copy_fraction": 0.95, "peers": {}, "extra_bytes": 0,
        "output_bytes": 100, "bytes": 335_675_392, "copy_gbps": 4200.0, "launch_floor_us": 2.8,
    }  # fmt: skip
    return base | changes


def test_met_and_missed():
    verdicts, unheard = targets.judge([_line(), _line(copy_fraction=0.5)])
    assert [v.met for v in verdicts] == [True, False]
    assert len(unheard) == len(targets.of("h_aggregate")) - 1
    assert verdicts[0].floor_us == pytest.approx(79.92 + 2.8, abs=0.01)
    assert verdicts[0].over_floor == pytest.approx(84 / 82.72, rel=1e-3)
    show.judged(verdicts, unheard)


NORM = {"op": "rmsnorm_residual", "shape": {"T": 32768, "D": 4096}}


@pytest.mark.parametrize(
    ("changes", "reached", "met"),
    [
        ({"shape": {"T": 1, "D": 4096}, "us": 4.4}, 4.4, True),
        ({"shape": {"T": 1, "D": 4096}, "us": 4.6}, 4.6, False),
        ({"shape": {"T": 128, "D": 4096}, "us": 6.31}, 6.31, False),
        ({"direction": "bwd", "contract": "tree256", "copy_fraction": 0.86}, 0.86, True),
        (NORM | {"peers": {"rms_norm + clone": {"us": 1, "ratio": 0.9}}}, 0.9, False),
        (NORM, None, None),
    ],
)  # fmt: skip
def test_each_metric(changes, reached, met):
    verdicts, _ = targets.judge([_line(**changes)])
    assert [(v.value, v.met) for v in verdicts] == [(reached, met)]


def test_memory_target():
    line = _line(
        op="rmsnorm_residual", direction="fwd+bwd", shape={"T": 131072, "D": 4096},
        peers={"pytorch eager": {"us": 1, "ratio": 7.0}}, extra_bytes=101,
    )  # fmt: skip
    assert sorted((v.target.metric, v.met) for v in targets.judge([line])[0]) == [
        ("extra_over_outputs", False),
        ("ratio", True),
    ]


def test_other_contracts_backends_and_shapes_are_not_judged():
    lines = [_line(backend="triton"), _line(shape={"T": 8192, "D": 7168}), _line(shape={"T": 4096, "D": 4096})]
    assert targets.judge(lines)[0] == []


def test_targets_name_what_exists():
    for name in registry.names():
        spec = registry.spec(name)
        for target in targets.of(name):
            assert (target.at_least is None) != (target.at_most is None)
            assert all(spec.contract(contract) for contract in target.contracts)
            assert target.text


def test_every_committed_line_is_a_result():
    """The demo and the report read them all."""
    files = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))
    lines = results.read(files)
    assert {"linear", "attention", "minimax_h3"} <= {line["op"] for line in lines}
    verdicts, _ = targets.judge(lines)
    assert len(verdicts) > 100
