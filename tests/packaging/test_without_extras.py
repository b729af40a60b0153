"""Without the extras: everything that needs only torch works, and what needs more says which extra to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"

BLOCK = """
import sys

class Absent:
    names = ("cuda", "triton", "matplotlib", "transformers")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

LIBRARY = """
import json, torch, samebits
from samebits import dispatch, registry
from samebits.dispatch import Call
from samebits.runtime import device

told = {}
pre, residual = torch.rand(3, 4, requires_grad=True), torch.randn(3, 4, 16).bfloat16().requires_grad_()
hidden = samebits.h_aggregate(pre, residual)
hidden.float().sum().backward()
told["h_aggregate"] = [list(hidden.shape), list(pre.grad.shape), list(residual.grad.shape)]
x, gamma = torch.randn(3, 16).bfloat16().requires_grad_(), torch.ones(16, requires_grad=True)
y, copy = samebits.rmsnorm_residual(x, gamma)
(y.float().sum() + copy.float().sum()).backward()
told["rmsnorm_residual"] = [list(y.shape), list(x.grad.shape), list(gamma.grad.shape)]
told["chosen"] = samebits.explain("h_aggregate", pre.detach(), residual.detach()).choice.backend
for backend in ("cuda", "triton"):
    try:
        samebits.h_aggregate(pre.detach(), residual.detach(), backend=backend)
    except samebits.UnsupportedError as error:
        told[f"{backend} on a CPU"] = str(error)
    spec = registry.spec("h_aggregate")
    call = Call("h_aggregate", False, "ascending", 3, (("D", 16),), (), ("hidden",), "float32", device.H200)
    try:
        dispatch.choose(spec, call, backend, {backend: device.missing(backend)})
    except samebits.UnsupportedError as error:
        told[f"{backend} on a GPU"] = str(error)
told["loaded"] = [name for name in Absent.names if name in sys.modules]
print(json.dumps(told))
"""

COMMANDS = """
import contextlib, io, json
from samebits import cli

told = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["samebits", *words]
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    told.append([code or 0, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""


def fresh(script: str, *words: str) -> Any:
    """What the script prints last, as JSON, in a process that cannot import any of the extras."""
    known = dict(os.environ) | {"PYTHONPATH": str(SOURCE), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + script, *words], env=known, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_block_works() -> None:
    """A test that could import an extra after all would prove nothing."""
    with pytest.raises(AssertionError, match="No module named 'triton"):
        fresh("import triton")


def test_the_library_works() -> None:
    told = fresh(LIBRARY)
    assert told["h_aggregate"] == [[3, 16], [3, 4], [3, 4, 16]]
    assert told["rmsnorm_residual"] == [[3, 16], [3, 16], [16]]
    assert told["chosen"] == "reference"
    assert told["loaded"] == []
    for backend in ("cuda", "triton"):
        assert f"'{backend}' needs a CUDA tensor" in told[f"{backend} on a CPU"]
        assert f"pip install 'samebits[{backend}]'" in told[f"{backend} on a GPU"]


@pytest.fixture(scope="module")
def commands() -> dict[str, tuple[int, str, str]]:
    lines = [
        "list",
        "env",
        "check h_aggregate --device cpu --rows 5 --size D=16",
        "explain rmsnorm_residual",
        "audit",
        "audit h_aggregate",
    ]
    return dict(zip(lines, map(tuple, fresh(COMMANDS, json.dumps([line.split() for line in lines]))), strict=True))


@pytest.mark.parametrize(
    "line", ["list", "env", "check h_aggregate --device cpu --rows 5 --size D=16", "explain rmsnorm_residual"]
)
def test_commands_that_need_no_extra_work(commands: dict[str, tuple[int, str, str]], line: str) -> None:
    code, out, err = commands[line]
    assert code == 0, out + err
    assert out.strip() and "Traceback" not in err


@pytest.mark.parametrize("line", ["audit", "audit h_aggregate"])
def test_a_command_that_needs_an_extra_names_it(commands: dict[str, tuple[int, str, str]], line: str) -> None:
    code, out, err = commands[line]
    assert code == 2, out + err
    assert len(err.strip().splitlines()) == 1, err
    assert "pip install 'samebits[" in err and "Traceback" not in err
