import json
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner
from verify import faults

from samebits.cli.check import check

FAULTS = Path(faults.__file__)
app = typer.Typer()
app.command()(check)
app.callback()(lambda: None)


def run(*words, code=None):
    result = CliRunner().invoke(app, ["check", *map(str, words), "--device", "cpu"])
    if code is not None:
        assert result.exit_code == code, result.output
    return result


def test_a_pass_is_zero_and_says_what_was_compared():
    output = run("h_aggregate", "--rows", 9, "--size", "D=24", code=0).output
    for words in ("forward_accuracy", "gradient_invariance", "contract ascending", "ops/h_aggregate/golden.py"):
        assert words in output


@pytest.mark.parametrize("target", ["torch.mm", f"{FAULTS}:batch_dependent_split"])
def test_a_failure_is_one_and_its_reproduction_works(target, tmp_path):
    """The printed line, run as printed, shows the same first difference."""
    arguments = [target, "--rows", 18] + (
        [] if target == "torch.mm" else ["--against", "h_aggregate", "--size", "D=24"]
    )
    stored = tmp_path / "report.json"
    output = run(*arguments, "--only", "batch", "--json", stored, code=1).output
    assert "batch size 1 vs 18" in output
    report = json.loads(stored.read_text())
    failure = next(f for c in report["checks"] for f in c["failures"])
    assert failure["reproduce"] in output
    command, *words = shlex.split(failure["reproduce"])
    assert command == "samebits"
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert failure["what"] in again.output


def test_reproduction_of_a_wrong_value():
    output = run("h_aggregate", "--against", f"{FAULTS}:skipped_tail", "--rows", 5, "--size", "D=24", code=1).output
    line = next(line for line in output.splitlines() if "reproduce:" in line).split("reproduce: ")[1]
    assert "--only accuracy --forward-only" in line
    again = CliRunner().invoke(app, shlex.split(line)[1:])
    assert again.exit_code == 1 and "column 23" in again.output


def test_all_contracts_make_a_list(tmp_path):
    stored = tmp_path / "report.json"
    run("rmsnorm_residual", "--contract", "all", "--rows", 3, "--size", "D=8", "--json", stored, code=0)
    assert [r["options"]["contract"] for r in json.loads(stored.read_text())] == ["ascending", "tree512"]


def test_a_gradient_that_cannot_be_taken_is_one_unless_it_was_left_out():
    common = ("h_aggregate", "--against", f"{FAULTS}:not_differentiable", "--rows", 5, "--size", "D=24")
    assert "not run" in run(*common, code=1).output
    run(*common, "--forward-only", code=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("h_agregate",), "neither an operator nor importable"),
        (("h_aggregate", "--dtype", "int8"), "choose one of float32"),
        (("h_aggregate", "--size", "D"), "AXIS=NUMBER"),
        (("torch.mm", "--contract", "all"), "needs an operator"),
        (("torch.mm", "--nonsense"), "No such option"),
    ],
)
def test_wrong_use_is_two(words, message):
    assert message in run(*words, code=2).output
