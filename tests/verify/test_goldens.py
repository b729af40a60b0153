import json
from pathlib import Path

import pytest

from samebits import registry
from samebits.verify import goldens

GOLDEN = Path(__file__).parents[1] / "golden"
PORTABLE = GOLDEN / "portable.json"


def test_portable_digests_are_as_committed():
    assert goldens.compare(PORTABLE) == []


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("sm_*.json")) or [PORTABLE], ids=lambda p: p.stem)
def test_every_architecture_agrees_where_the_contract_is_portable(path):
    assert goldens.disagreements_with_portable(path, PORTABLE) == []


def test_every_operator_and_contract_has_digests():
    keys = json.loads(PORTABLE.read_text())["digests"]
    for name in registry.names():
        for contract in registry.spec(name).contracts:
            assert any(key.startswith(f"{name}/{contract.name}/") for key in keys)
    assert not any(key.endswith(("/y", "/rstd")) for key in keys)  # rsqrt is the device's own


def test_a_changed_bit_is_seen(tmp_path, monkeypatch):
    from samebits.exact import fold
    from samebits.ops.h_aggregate import reference

    monkeypatch.setitem(reference._FOLD_OVER_D, "ascending", lambda terms: fold.left_fold(terms.flip(-1), -1))
    changed = goldens.compare(PORTABLE)
    assert changed
    assert {line.split(":")[0].rsplit("/", 1)[1] for line in changed} == {"grad_pre"}
    assert all(line.startswith("h_aggregate/ascending/backward/") for line in changed)


def test_missing_and_new_entries_are_seen():
    assert goldens.differences({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == [
        "b: stored, but no longer computed",
        "c: computed, but not stored",
    ]


def test_what_is_written_compares(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "names", lambda: ("rmsnorm_residual",))
    path = tmp_path / "some.json"
    goldens.write(path)
    assert goldens.compare(path) == []
    assert json.loads(path.read_text())["backend"] == "reference"
