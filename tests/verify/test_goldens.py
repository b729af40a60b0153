import importlib
import json
from pathlib import Path

import pytest
import torch

from samebits import catalogue, registry
from samebits.exact import elementary
from samebits.verify import goldens

GOLDEN = Path(__file__).parents[1] / "golden"
PORTABLE = GOLDEN / "portable.json"


def digests_of(path: Path) -> dict[str, str]:
    return json.loads(path.read_text())["digests"]


def of_operator(path: Path, name: str) -> dict[str, str]:
    return {key: value for key, value in digests_of(path).items() if key.split("/")[0] == name}


@pytest.mark.parametrize("name", catalogue.names())
def test_portable_digests_are_as_committed(name):
    assert goldens.differences(of_operator(PORTABLE, name), goldens.compute("cpu", "reference", [name])) == []


@pytest.mark.parametrize("name", catalogue.names())
def test_a_cpu_gives_every_digest_of_the_gpu(name):
    """The GPU's bits on a laptop: tensor cores, orders of sums and elementary functions, forward and backward."""
    files = sorted(GOLDEN.glob("sm_*.json"))
    assert files
    for path in files:
        stored = of_operator(path, name)
        now = goldens.compute("cpu", "reference", [name], architecture=path.stem)
        assert stored and goldens.differences(stored, now, goldens.AWAITING_GPU.get(path.stem, ())) == []


def test_another_elementary_function_is_seen(monkeypatch):
    """The last 2^-26 of log2(e) left out of the exponential."""
    monkeypatch.setattr(elementary, "_LOG2_E_LOW", 0.0)
    stored = of_operator(GOLDEN / "sm_90.json", "hc_split_sinkhorn")
    now = goldens.compute("cpu", "reference", ["hc_split_sinkhorn"], architecture="sm_90")
    changed = {line.split(":")[0].split("/")[-1] for line in goldens.differences(stored, now)}
    assert changed == {"pre", "post", "comb", "grad_logits"}


def test_the_command_compares_a_gpu_file_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(catalogue, "names", lambda: ("timestep_sinusoid",))
    path = tmp_path / "sm_90.json"
    content = json.loads((GOLDEN / "sm_90.json").read_text())
    own = of_operator(GOLDEN / "sm_90.json", "timestep_sinusoid")
    path.write_text(json.dumps(content | {"digests": own}))
    monkeypatch.setattr("sys.argv", ["goldens", "compare", str(path), "--device", "cpu"])
    assert goldens.main() == 0
    key = next(iter(own))
    path.write_text(json.dumps(content | {"digests": own | {key: "0" * 64}}))
    assert goldens.main() == 1
    assert key in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("sm_*.json")) or [PORTABLE], ids=lambda p: p.stem)
def test_every_architecture_agrees_where_the_contract_is_portable(path):
    assert goldens.disagreements_with_portable(path, PORTABLE) == []


def test_what_is_awaited_is_not_on_record():
    for arch, cases in goldens.AWAITING_GPU.items():
        stored = json.loads((GOLDEN / f"{arch}.json").read_text())["digests"]
        assert not any(key.split("/")[3] in cases for key in stored), "recorded: the entry has to go"


def test_an_architecture_may_lack_only_what_is_newer_than_its_record(tmp_path, monkeypatch):
    """A new case is excused, a wrong digest of it is not; nor is any other digest that is missing or wrong."""
    arch, case = "sm_90", "t16_128_started"
    monkeypatch.setitem(goldens.AWAITING_GPU, arch, (case,))
    stored = json.loads((GOLDEN / f"{arch}.json").read_text())
    stored["digests"] = {key: value for key, value in stored["digests"].items() if key.split("/")[3] != case}
    everywhere = json.loads(PORTABLE.read_text())["digests"]
    awaited = [key for key in everywhere if key.split("/")[3] == case and goldens.is_proven(key, arch)]
    assert awaited
    old = next(key for key in sorted(stored["digests"]) if goldens.is_proven(key, arch) and goldens.is_portable(key))

    def told(changes, lost=()):
        digests = {key: value for key, value in (stored["digests"] | changes).items() if key not in lost}
        path = tmp_path / f"{arch}.json"
        path.write_text(json.dumps(stored | {"digests": digests}))
        return [line.split(":")[0] for line in goldens.disagreements_with_portable(path, PORTABLE)]

    assert told({}) == []
    assert told({key: everywhere[key] for key in awaited}) == []
    for key in awaited:
        assert told({key: "0" * 64}) == [key]
    assert told({old: "0" * 64}) == [old]
    assert told({}, lost=[old]) == [old]


def test_only_named_cases_are_excused_and_only_their_absence():
    old, new = "op/c/forward/old/y", "op/c/forward/new/y"
    assert goldens.differences({old: "1"}, {old: "1", new: "2"}, ("new",)) == []
    assert goldens.differences({old: "1", new: "2"}, {old: "1"}, ("new",)) == []
    assert goldens.differences({old: "1", new: "2"}, {old: "1", new: "3"}, ("new",)) == [f"{new}: stored 2, now 3"]
    assert goldens.differences({old: "1"}, {new: "2"}, ("new",)) == [f"{old}: stored, but no longer computed"]


def has_portable_results(name):
    """Not so where everything rests on a device function, as the Sinkhorn matrix and its gradient on exp."""
    spec = registry.spec(name)
    results = [result.name for result in (*spec.forward.results, *spec.backward.results)]
    return any(
        goldens.is_portable(f"{name}/{c.name}/either/any/{result}") for c in spec.contracts for result in results
    )


@pytest.mark.parametrize("name", registry.names())
def test_flushing_subnormals_changes_the_tiny_digests(name, monkeypatch):
    """E10: with subnormals flushed to zero the reference gives other bits, so the digests hold every machine to them."""
    reference = importlib.import_module(f"samebits.ops.{name}.reference")
    cases = importlib.import_module(f"samebits.ops.{name}.cases")
    monkeypatch.setattr(cases, "CASES", [case for case in cases.CASES if case.pattern == "tiny"])
    stored = json.loads(PORTABLE.read_text())["digests"]
    if not has_portable_results(name):  # then the gradients are held to what this machine gives
        monkeypatch.setattr(goldens, "is_portable", lambda key: "/backward/" in key)
        stored = goldens.compute("cpu", "reference", [name])
    tiny = {key: stored[key] for key in goldens.compute("cpu", "reference", [name])}
    assert tiny and goldens.differences(tiny, goldens.compute("cpu", "reference", [name])) == []
    right = reference.run

    def flushed(*arguments):
        assert torch.set_flush_denormal(True), "this processor cannot flush subnormals"
        try:
            right(*arguments)
        finally:
            torch.set_flush_denormal(False)

    monkeypatch.setattr(reference, "run", flushed)
    changed = {line.split(":")[0] for line in goldens.differences(tiny, goldens.compute("cpu", "reference", [name]))}
    copies = {key for key in tiny if key.endswith("/residual")}  # a byte copy has no arithmetic
    masked = {key for key in tiny if key.endswith("/t6_1000_tiny/grad_gamma")}  # ordinary rows hide what the others add
    shows = getattr(cases, "FLUSHING_SHOWS", None)
    if shows is None:
        assert changed == set(tiny) - copies - masked
    else:
        assert {key.split("/")[-1] for key in changed} >= set(shows)


def test_the_subnormal_bits_are_those_of_exact_arithmetic():
    """E10, H16: products in FP64, where nothing here underflows, rounded once; the cast to BF16 in integers."""
    from samebits.exact.compare import same_bits
    from samebits.exact.rounding import to_bfloat16
    from samebits.ops.h_aggregate import reference
    from samebits.verify.operators import draw

    spec = registry.spec("h_aggregate")
    sizes = {"H": 4, "D": 500}
    pre, residual = (draw(spec, arg, range(0, 8, 2), sizes, 3, pattern="tiny") for arg in spec.forward.inputs)
    grad = draw(spec, spec.backward.inputs[0], range(0, 8, 2), sizes, 3, pattern="tiny")
    least = torch.finfo(torch.float32).tiny

    def inexact(exact, rounded):
        small = (rounded != 0) & (rounded.abs() < least)
        return float((small & (exact != rounded.double())).float().mean())

    exact = pre.double()[..., None] * residual.double()
    products = exact.float()
    assert inexact(exact, products) > 0.5  # with BF16 inputs on one side: bits are lost because the results are small
    first, second = (products[:, i].double() + products[:, i + 1].double() for i in (0, 2))
    hidden = (first.float().double() + second.float().double()).float()
    assert same_bits(reference.forward(pre, residual), to_bfloat16(hidden))
    exact = pre.double()[..., None] * grad.double()[:, None]
    assert inexact(exact, exact.float()) > 0.5
    assert same_bits(reference.backward_residual(grad, pre), exact.float())
    both = grad.bfloat16()[:, None].double() * residual.double()
    assert inexact(both, both.float()) > 0.1  # two BF16 factors: only what lies far enough below 2^-126 loses bits
    total = torch.zeros(4, 4)
    for column in both.float().unbind(-1):
        total = (total.double() + column.double()).float()
    assert same_bits(reference.backward_pre(grad.bfloat16(), residual, "ascending"), total)


def test_every_operator_and_contract_has_digests():
    keys = json.loads(PORTABLE.read_text())["digests"]
    for name in registry.names():
        for contract in registry.spec(name).contracts:
            assert any(key.startswith(f"{name}/{contract.name}/") for key in keys) == has_portable_results(name)
    assert all(goldens.is_portable(key) for key in keys)
    assert not any(key.endswith("/rstd") for key in keys)  # rsqrt is the device's own


def test_a_changed_bit_is_seen(tmp_path, monkeypatch):
    from samebits.exact import fold
    from samebits.ops.h_aggregate import reference

    two = ("h_aggregate", "rmsnorm_residual")
    stored = json.loads(PORTABLE.read_text())
    stored["digests"] = {key: value for key, value in stored["digests"].items() if key.split("/")[0] in two}
    path = tmp_path / "portable.json"
    path.write_text(json.dumps(stored))
    monkeypatch.setattr(registry, "names", lambda: two)
    assert goldens.compare(path) == []
    monkeypatch.setitem(reference._FOLD_OVER_D, "ascending", lambda terms: fold.left_fold(terms.flip(-1), -1))
    changed = goldens.compare(path)
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
