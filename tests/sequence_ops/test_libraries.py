"""The program that compares attention with torch's libraries: what it asks, what it writes down, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

import samebits
from samebits.exact.compare import same_bits
from samebits.sequence_ops.attention import libraries
from samebits.sequence_ops.attention.peers import sdpa

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "attention_libraries.json"
CPU = torch.device("cpu")
SMALL = (
    libraries.Case("bfloat16", 64, True, 2, 1, 5, 5),
    libraries.Case("float16", 64, False, 2, 2, 3, 7),
)


def library(backend, q, k, v, causal):
    """cuDNN with the bits of ``cudnn``; FlashAttention-2 with another last element than ``fa2``."""
    if backend is SDPBackend.CUDNN_ATTENTION:
        return samebits.attention(q, k, v, causal=causal)[0].transpose(1, 2).contiguous().transpose(1, 2)
    out = samebits.attention(q, k, v, causal=causal, contract="fa2")[0].clone()
    out.view(-1)[-1] *= 2
    return out


def test_a_record_has_the_form_of_the_committed_one():
    said: list[str] = []
    made = libraries.record(SMALL, CPU, library, said.append)
    committed = json.loads(RECORD.read_text())
    assert list(made) == list(committed) and made["kind"] == committed["kind"] and made["what"] == committed["what"]
    assert all(list(entry) == list(committed["cases"][0]) for entry in made["cases"])
    assert [json.loads(line) for line in said] == made["cases"]
    assert [(e["cudnn"], e["fa2"], e["elements"]) for e in made["cases"]] == [(0, 1, 5 * 2 * 64), (0, 1, 3 * 2 * 64)]
    assert [(e["dtype"], e["causal"], e["H"], e["Hk"], e["Sq"], e["Sk"]) for e in made["cases"]] == [
        ("bfloat16", True, 2, 1, 5, 5),
        ("float16", False, 2, 2, 3, 7),
    ]


def test_what_is_asked_covers_the_committed_record():
    asked = [case.to_json() for case in libraries.cases()]
    for entry in json.loads(RECORD.read_text())["cases"]:
        assert {key: entry[key] for key in asked[0]} in asked
    assert len(asked) == 90 and sum(case["Sq"] == libraries.LONG for case in asked) == 2
    assert all(case["Sq"] == case["Sk"] for case in asked if case["causal"])


def test_a_library_that_fails_is_written_down():
    def broken(*_):
        raise RuntimeError("No available\n kernel.")

    found = libraries.compare(SMALL[0], CPU, broken)
    assert found["cudnn"] == found["fa2"] == "RuntimeError: No available kernel."


def test_the_library_is_given_the_mask_and_the_key_heads():
    q, k, v = SMALL[0].drawn(CPU)
    masked, whole = (sdpa(SDPBackend.MATH, q, k, v, causal) for causal in (True, False))
    assert masked.shape == q.shape and same_bits(masked[:, 0], v[:, 0].expand_as(q[:, 0]))
    assert not same_bits(whole[:, 0], masked[:, 0]) and same_bits(sdpa(SDPBackend.MATH, q, k, v), whole)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: --out"),
        (["--out", "no/folder/x.json"], "there is no folder no/folder"),
        (["--out", "x.json"], "run on an NVIDIA GPU alone"),
    ],
)
def test_wrong_use(words, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(libraries, "record", None)
    with pytest.raises(SystemExit) as raised:
        libraries.main(words)
    assert raised.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [(0, 0), ("RuntimeError: no", 1)])
def test_the_program_writes_the_record(answer, code, monkeypatch, tmp_path, capsys):
    entry = SMALL[0].to_json() | {"cudnn": 0, "fa2": answer, "elements": 640}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(libraries, "record", lambda *_: {"kind": libraries.KIND, "cases": [entry]})
    assert libraries.main(["--out", str(tmp_path / "r.json")]) == code
    assert json.loads((tmp_path / "r.json").read_text())["cases"] == [entry]
    assert f"1 cases, {code} with a call that failed" in capsys.readouterr().out
