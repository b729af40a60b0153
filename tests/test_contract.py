"""Declarations that could not be kept are refused; what follows from a declaration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samebits.contract import BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg, validate

KINDS = ("bfloat16", "float16", "float32")
GATE = OpSpec(
    name="gate",
    summary="residual + gate[index] * y",
    forward=Pass(
        inputs=(
            TensorArg("residual", ("D",), KINDS),
            TensorArg("y", ("D",), KINDS, like="residual"),
            TensorArg("gate", ("R", "D"), KINDS, rows=False, like="y"),
            TensorArg("index", (), ("int64",), below="R"),
            TensorArg("order", (), ("int64",), optional=True, derived=True),
        ),
        results=(Result("out", ("D",), "residual"),),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_out", ("D",), KINDS),
            TensorArg("y", ("D",), KINDS, like="grad_out"),
            TensorArg("gate", ("R", "D"), KINDS, rows=False, like="grad_out"),
            TensorArg("index", (), ("int64",), below="R"),
            TensorArg("order", (), ("int64",), optional=True, derived=True),
        ),
        results=(Result("grad_y", ("D",), "grad"), Result("grad_gate", ("R", "D"), "float32", rows=False)),
    ),
    contracts=(
        Contract("tiles", "", "portable", (Reduction("grad_gate", "T", "tiles"),), (), chain_rows=0),
        Contract(
            *("narrow", "", "portable", (Reduction("grad_gate", "T", "tiles"),), ()),
            dtypes=(("residual", KINDS[:2]), ("gate", KINDS[:2])),
        ),
    ),
    backends=(BackendSpec("reference"),),
    size_limits=(("D", 1, 64), ("R", 1, 64)),
    through=(("residual", "out"),),
)


def forward(spec: OpSpec, name: str, **changes: object) -> OpSpec:
    """The declaration with one forward input changed."""
    inputs = tuple(replace(a, **changes) if a.name == name else a for a in spec.forward.inputs)  # type: ignore[arg-type]
    return replace(spec, forward=replace(spec.forward, inputs=inputs))


def test_the_declaration_stands() -> None:
    validate(GATE)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (forward(GATE, "y", like="gate"), "must stand before it"),
        (forward(GATE, "y", dtypes=("bfloat16",)), "must list the same dtypes"),
        (forward(GATE, "index", below="S"), "is no index below an axis"),
        (forward(GATE, "y", below="R"), "is no index below an axis"),
        (forward(GATE, "order", optional=False), "derived, so it must be optional"),
        (replace(GATE, forward=replace(GATE.forward, results=(Result("out", ("D",), "x"),))), "neither a dtype nor an input"),
        (
            replace(GATE, forward=replace(GATE.forward, results=(Result("out", ("D",), "float32", wide=True),))),
            "in an input's dtype",
        ),
        (replace(GATE, through=(("residual", "y"),)), "no result"),
        (replace(GATE, through=(("index", "out"),)), "is no input"),
        (replace(GATE, through=(("gate", "out"),)), "must have the same axes"),
        (replace(GATE, through=(("y", "out"),)), "declared as a result of the backward too"),
        (replace(GATE, paired=(("S", "D"),)), "are not free axes"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(changed: OpSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validate(changed)


def test_inputs_of_one_dtype() -> None:
    assert GATE.forward.kin("y") == ("residual", "y", "gate")
    assert GATE.forward.kin("index") == ("index",)


def test_a_contract_narrows_all_of_them() -> None:
    narrow = GATE.contract("narrow")
    assert narrow.accepted(GATE.forward.input("residual")) == KINDS[:2]
    assert narrow.accepted(GATE.forward.input("y")) == KINDS[:2]
    assert GATE.default_contract.accepted(GATE.forward.input("y")) == KINDS


def test_inputs_that_have_a_gradient() -> None:
    assert GATE.learned == ("residual", "y", "gate")


def test_gradients_are_fp32_or_as_narrow_as_the_leaf() -> None:
    assert GATE.gradient_dtypes == ("float32", "bfloat16", "float16")
    assert GATE.gradient_dtypes_of({"y": "float16"}) == ("float32", "float16")
    assert GATE.gradient_dtypes_of({"y": "float32"}) == ("float32",)


def test_columns_in_pairs() -> None:
    spec = replace(GATE, paired=(("R", "D"),))
    validate(spec)
    assert spec.misfit({"R": 6, "D": 6}) is None
    assert spec.misfit({"R": 5, "D": 6}) == "R = 5 columns; accepted is an even number up to D = 6"
    assert spec.misfit({"R": 8, "D": 7}) == "R = 8 columns; accepted is an even number up to D = 7"
    for asked, got in ((8, 6), (5, 4), (2, 2), (1, 2)):
        assert spec.fitted({"R": asked, "D": 7}) == {"R": got, "D": 7}
    assert spec.fitted({"R": 9, "D": 1}) == {"R": 2, "D": 2}
    assert GATE.misfit({"R": 5, "D": 2}) is None
    assert GATE.fitted({"R": 5, "D": 2}) == {"R": 5, "D": 2}
