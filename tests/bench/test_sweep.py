"""Cases, traffic, peers and result lines, without a GPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from samebits import registry
from samebits.bench import bits, peers, results, show, targets, tensors, work
from samebits.bench.case import Case, output_bytes, sweep, traffic
from samebits.bench.run import Settings, run

OPS = registry.names()
SMALL = (("D", 64),)
SIZES = {"D": 64, "N": 24, "K": 96, "F": 40, "R": 6, "H": 64}


def small(name):
    return tuple((axis, SIZES[axis]) for axis, _ in registry.spec(name).tuned)


def here(name, direction="fwd"):
    """Peers that this machine can run in a direction; the others need a GPU, or a library that no test machine has."""
    able = [other for other in peers.of(name) if other.unavailable("cpu") is None]
    return [other for other in able if direction == "fwd" or other.leaves(registry.spec(name))]


def _given(op, case):
    cpu = torch.device("cpu")
    return work.Given(
        tensors.forward_inputs(op.spec, case, cpu),
        tensors.upstream(op.spec, case, cpu) if case.direction != "fwd" else {},
    )


def test_traffic_counts_every_tensor_once():
    t, d = 10, 4096
    h = registry.spec("h_aggregate")
    shape = (("D", d),)
    assert traffic(h, Case("h_aggregate", "fwd", t, shape)) == t * (16 + 8 * d + 2 * d)
    assert traffic(h, Case("h_aggregate", "bwd", t, shape)) == t * (2 * d + 16 + 8 * d + 16 + 8 * d)
    assert traffic(h, Case("h_aggregate", "bwd", t, shape, "float32")) == t * (4 * d + 16 + 8 * d + 16 + 16 * d)
    norm = registry.spec("rmsnorm_residual")
    forward = t * (2 * d * 3 + 4) + 4 * d
    backward = t * (2 * d * 4 + 4) + 4 * d * 2
    assert traffic(norm, Case("rmsnorm_residual", "fwd", t, shape)) == forward
    assert traffic(norm, Case("rmsnorm_residual", "fwd+bwd", t, shape)) == forward + backward
    rope, heads = registry.spec("rope_3axis"), (("N", 3), ("D", 128), ("R", 96))  # grad_x has the dtype of grad_y
    assert traffic(rope, Case("rope_3axis", "bwd", t, heads)) == t * (4 * 384 + 8 * 96)
    assert traffic(rope, Case("rope_3axis", "bwd", t, heads, "float32")) == t * (8 * 384 + 8 * 96)
    assert output_bytes(norm, Case("rmsnorm_residual", "fwd", t, shape)) == t * (2 * d * 2 + 4)


def test_full_sweep_covers_every_axis():
    for name in OPS:
        spec = registry.spec(name)
        cases = sweep(spec)
        assert {c.rows for c in cases} == {1, 8, 128, 1024, 4096, 8192, 32768, 65536, 131072}
        tuned = ([(axis, size) for size in sizes] for axis, sizes in spec.tuned)
        assert {c.sizes for c in cases} == set(itertools.product(*tuned))
        assert {c.direction for c in cases} == {"fwd", "bwd", "fwd+bwd"}
        assert len(set(cases)) == len(cases)
        assert all(c.grads == "model" for c in cases if c.direction != "bwd")


def test_quick_sweep_is_what_the_targets_need():
    for name in OPS:
        cases = targets.quick_cases(name)
        assert 2 <= len(cases) <= 40  # linear: four products at seven sizes, and their backward at three
        for target in targets.of(name):
            rows = [{"op": name, "direction": c.direction, "backend": "cuda", "contract": k.name, "shape": c.shape()}
                    for c in cases for k in registry.spec(name).contracts]  # fmt: skip
            assert any(target.covers(row) for row in rows), target


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_peers_do_the_same_work(name, direction, eager_compile):
    """A peer is only worth a ratio if it computes the same function: close to the reference, on the same inputs."""
    op = registry.operator(name)
    case = Case(name, direction, 6, small(name))
    given = _given(op, case)
    ours = work.candidate(op, case, given, op.spec.default_contract.name, "reference").prepare()()
    names = [r.name for r in op.spec.forward.results] * (direction != "bwd")
    names += [r.name for r in op.spec.backward.results] * (direction != "fwd")
    known = dict(zip(names, ours, strict=True))
    able = here(name, direction)
    assert able
    for other in able:
        theirs = work.peer(op, case, given, other).prepare()()
        shown = [*other.results(op.spec)] * (direction != "bwd")
        shown += [f"grad_{leaf}" for leaf in other.leaves(op.spec)] * (direction != "fwd")
        for one, two in zip(theirs, [known[result] for result in shown], strict=True):
            assert one.shape == two.shape
            error = (one.double() - two.double()).norm() / two.double().norm()
            assert error < 2e-2, (other.name, float(error))


def test_backward_peers_repeat(eager_compile):
    """One retained forward serves every timed backward, compiled ones included."""
    op = registry.operator("rmsnorm_residual")
    case = Case(op.name, "bwd", 5, SMALL)
    for other in here(op.name, "bwd"):
        call = work.peer(op, case, _given(op, case), other).prepare()
        first, second = call(), call()
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_lines_have_every_key_and_checked_bits(name, machine, stamp, traced_compile, tmp_path: Path):
    op = registry.operator(name)
    cases = [c for rows in (1, 9) for c in sweep(op.spec, (rows,), dict(small(name)))]
    settings = Settings(tuple(c.name for c in op.spec.contracts), ("reference",))
    lines = list(run(op, cases, settings, machine, stamp))
    assert len(lines) == len(cases) * len(op.spec.contracts)
    for line in lines:
        assert tuple(line)[: len(results.KEYS)] == results.KEYS
        assert line["bits_checked"] is True, line["bits"]
        names = {other.name for other in here(name, line["direction"])} | {peers.COPY}
        model = not results.has_fp32_gradients(line)
        assert set(line["peers_skipped"]) == ({p.name for p in peers.of(name)} - names if model else set())
        assert set(line["peers"]) == (names if not results.has_fp32_gradients(line) else {peers.COPY})
        assert line["copy_fraction"] == pytest.approx(line["bytes"] / line["us"] * 1e-3 / 10.0, abs=1e-4)
        copy = line["peers"][peers.COPY]
        assert copy["us"] > 0 and copy["ratio"] == pytest.approx(copy["us"] / line["us"], abs=1e-3)
    path = tmp_path / "deep" / "x.jsonl"
    results.write(path, lines)
    assert results.read([path]) == json.loads(json.dumps(lines))
    show.measured(lines)


def test_a_wrong_bit_is_seen():
    """The check must be able to fail: one flipped bit in an edge row, in a gradient, in a parameter gradient."""
    op = registry.operator("rmsnorm_residual")
    case = Case(op.name, "fwd+bwd", 40, SMALL)
    given = _given(op, case)
    outputs = work.candidate(op, case, given, "ascending", "reference").prepare()()
    truth = bits.expected(op, case, given, "ascending", 1 << 34)
    assert bits.compare(op, case, outputs, truth).ok
    names = ["y", "residual", "rstd", "grad_x", "grad_gamma"]
    for position, name in enumerate(names):
        broken = [t.clone() for t in outputs]
        flat = broken[position].view(torch.int16 if broken[position].dtype == torch.bfloat16 else torch.int32)
        flat[-1] ^= 1
        verdict = bits.compare(op, case, tuple(broken), truth)
        assert not verdict.ok and verdict.scope.startswith(name)
    assert not bits.compare(op, case, outputs, bits.expected(op, case, given, "tree512", 1 << 34)).ok


def test_unfolded_parameter_gradient_is_not_called_checked():
    op = registry.operator("rmsnorm_residual")
    case = Case(op.name, "bwd", 40, SMALL)
    given = _given(op, case)
    outputs = work.candidate(op, case, given, "ascending", "reference").prepare()()
    verdict = bits.compare(op, case, outputs, bits.expected(op, case, given, "ascending", free_bytes=1000))
    assert not verdict.ok and "not compared: grad_gamma" in verdict.scope


def test_chosen_rows_reach_both_ends():
    assert bits.chosen_rows(1) == (0,)
    assert bits.chosen_rows(5) == (0, 1, 2, 3, 4)
    rows = bits.chosen_rows(131072)
    assert len(rows) == 12 and rows[0] == 0 and rows[-1] == 131071 and 65536 in rows


def test_what_does_not_fit_is_stated(machine, stamp):
    op = registry.operator("h_aggregate")
    machine.free = 1000
    (line,) = run(
        op, sweep(op.spec, (8,), {"D": 64}, ("fwd",)), Settings(("ascending",), ("reference",)), machine, stamp
    )
    assert "GB are free" in line["skipped"]
    assert show.notes([line])
    show.measured([line])


def test_compile_budget_is_stated(machine, stamp, eager_compile):
    op = registry.operator("h_aggregate")
    settings = Settings(("ascending",), ("reference",), compile_seconds=0)
    (line,) = run(op, sweep(op.spec, (8,), {"D": 64}, ("fwd",)), settings, machine, stamp)
    assert "already taken" in line["peers_skipped"]["torch.compile"]
    assert any("torch.compile" in note for note in show.notes([line]))


def test_results_file_with_a_bad_line_is_refused(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"op": "x"}\n')
    with pytest.raises(ValueError, match="line 1: not a benchmark result, it lacks 'contract'"):
        results.read([path])
    path.write_text("{]\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        results.read([path])


def test_what_was_measured_before_a_run_stopped_is_left(tmp_path, capsys):
    def stopped():
        yield {"contract": "a", "us": 1.0, "peers": {"other": {"us": 2.0, "ratio": 2.0}}}
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        results.record(tmp_path / "lines.jsonl", stopped())
    assert json.loads((tmp_path / "lines.jsonl").read_text())["us"] == 1.0
    assert "2.0 (2.00x)" in capsys.readouterr().out


def test_a_run_that_is_stopped_leaves_what_it_measured_and_the_old_results(tmp_path):
    path, part = tmp_path / "any.jsonl", tmp_path / "any.jsonl.part"
    results.write(path, [{"op": "old"}])

    def stopped():
        yield {"op": "one"}
        yield {"op": "two"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results.gather(path, stopped())
    assert _lines(path) == [{"op": "old"}]
    assert _lines(part) == [{"op": "one"}, {"op": "two"}]
    assert results.gather(path, iter([{"op": "new"}])) == [{"op": "new"}]
    assert _lines(path) == [{"op": "new"}]
    assert not part.exists()
    assert results.gather(None, iter([{"op": "new"}])) == [{"op": "new"}]


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
