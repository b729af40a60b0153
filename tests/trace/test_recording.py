"""What a trace holds, that it changes nothing, and that it leaves nothing behind."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from drift.models import Block, Net, batch
from torch import nn

import samebits
from samebits.exact.compare import same_bits
from samebits.verify.trace import read, trace
from samebits.verify.trace.digest import digest

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def calls(recording, phase="forward", kind="module"):
    return [event for event in recording.trace.events if event.phase == phase and event.kind == kind]


def paths(recording, phase="forward", kind="module"):
    return [event.path for event in calls(recording, phase, kind)]


def one(recording, path, phase="forward", kind="module"):
    (found,) = [event for event in calls(recording, phase, kind) if event.path == path]
    return found


def is_clean(model):
    return all(not getattr(module, hook) for module in model.modules() for hook in HOOKS) and all(
        not parameter._post_accumulate_grad_hooks for parameter in model.parameters()
    )


def run(model, x):
    """Output and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in model.parameters())]


# --- it changes nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_tracing_changes_no_bit_and_leaves_no_hook(reentrant):
    model, x = Net(32, 3, reentrant), batch(40, 32)
    expected = run(model, x)
    with trace(model, rows=True):
        found = run(model, x)
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    assert is_clean(model)


def test_hooks_go_when_the_block_raises():
    model = Net()
    with pytest.raises(KeyError), trace(model):
        raise KeyError("mine")
    assert is_clean(model)
    with pytest.raises(RuntimeError), trace(model):
        model(torch.randn(4, 9))
    assert is_clean(model)


def test_graphs_that_outlive_the_trace_record_nothing():
    model, x = Net(), batch().requires_grad_()
    with trace(model) as recording:
        y = model(x)
    count = len(recording.trace.events)
    y.sum().backward()
    assert len(recording.trace.events) == count and calls(recording, "backward") == []


# --- forward ----------------------------------------------------------------------------------------------------------


def test_calls_are_in_execution_order_with_their_parents():
    model, x = Net(), batch()
    with trace(model) as recording:
        y = model(x)
    inner = ["norm", "up", "down"]
    expected = [f"blocks.{i}{part}" for i in range(2) for part in (*(f".{name}" for name in inner), "")]
    assert paths(recording) == [*expected, "(model)"]
    root, block, up = (one(recording, path) for path in ("(model)", "blocks.1", "blocks.1.up"))
    assert (root.parent, block.parent, up.parent) == (None, root.start, block.start)
    assert root.start < block.start < up.start < up.end < block.end < root.end
    assert (block.cls, block.depth, up.depth) == ("Block", 1, 2)
    assert root.inputs[0].digest == digest(x) and root.outputs[0].digest == digest(y)
    assert one(recording, "blocks.0").outputs[0].digest == block.inputs[0].digest


def test_every_nesting_of_arguments_and_results():
    Point = namedtuple("Point", "left right")

    @dataclass
    class Output:
        logits: torch.Tensor
        more: tuple

    class Nested(nn.Module):
        def forward(self, x, *, state, scale=1.5, what=object):
            return Output(x * scale, (state["a"], OrderedDict(b=[Point(x, state["c"][1])])))

    x, a, c = torch.ones(2), torch.ones(3), torch.ones(4)
    with trace(Nested()) as recording:
        recording_model_output = recording._model(x, state={"a": a, "c": (None, c)})
    (event,) = calls(recording)
    assert [r.where for r in event.inputs] == ["args.0", "kwargs.state.a", "kwargs.state.c.1"]
    assert [r.where for r in event.outputs] == [
        *("output.logits", "output.more.0", "output.more.1.b.0.left", "output.more.1.b.0.right")
    ]
    assert event.values == {"kwargs.state.c.0": "None"}
    assert event.opaque == []
    assert event.outputs[3].digest == digest(recording_model_output.more[1]["b"][0].right)


def test_plain_values_and_opaque_arguments_are_named():
    class Takes(nn.Module):
        def forward(self, x, flag, thing):
            return x

    with trace(Takes()) as recording:
        recording._model(torch.ones(1), True, {1, 2})
    (event,) = calls(recording)
    assert event.values == {"args.1": "True"} and event.opaque == ["args.2: set"]


def test_strides_dtypes_and_scalars_are_recorded():
    class Odd(nn.Module):
        def forward(self, x, flag, empty, whole, complexes, eighth):
            return whole.sum()

    inputs = (
        *(torch.randn(6, 4).t()[::2], torch.tensor([True]), torch.empty(0, 3), torch.arange(3)),
        *(torch.randn(2, dtype=torch.complex64).conj(), torch.randn(5).to(torch.float8_e4m3fn)),
    )
    model = Odd()
    with trace(model) as recording:
        model(*inputs)
    (event,) = calls(recording)
    assert [r.dtype for r in event.inputs] == ["float32", "bool", "float32", "int64", "complex64", "float8_e4m3fn"]
    assert event.inputs[0].shape == (2, 6) and event.inputs[0].stride == (2, 4)
    assert [r.digest for r in event.inputs] == [digest(t) for t in inputs]
    assert event.outputs[0].shape == () and event.outputs[0].digest == digest(torch.tensor(3))


def test_repeated_calls_and_shared_modules_are_counted():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.first.weight

        def forward(self, x):
            return self.tied(self.second(self.first(x)))

    model = Twice()
    with trace(model) as recording:
        model(torch.randn(2, 4)).sum().backward()
    assert [(e.path, e.call) for e in calls(recording)] == [("first", 0), ("first", 1), ("tied", 0), ("(model)", 0)]
    weights = {e.path: e.outputs[0].digest for e in recording.trace.parameters()}
    assert weights["first.weight"] == weights["tied.weight"] == digest(model.first.weight)
    assert sorted(paths(recording, "backward", "gradient")) == ["first.bias", "first.weight", "tied.bias"]
    assert len(calls(recording, "backward")) == 4


def test_a_value_is_that_of_the_moment_of_the_call():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = InPlace()

        def forward(self, x):
            y = self.inner(x)
            y.add_(1)
            return y

    x = batch()
    before, doubled, end = x.clone(), x * 2, x * 2 + 1
    model = Outer()
    with trace(model) as recording:
        model(x).zero_()
    assert one(recording, "inner").inputs[0].digest == digest(before)
    assert one(recording, "inner").outputs[0].digest == digest(doubled)
    assert one(recording, "(model)").outputs[0].digest == digest(end)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode):
    model, x = Net(), batch()
    with trace(model) as plain:
        model(x)
    with trace(model) as recording, mode():
        model(x)
    assert [e.outputs for e in calls(recording)] == [e.outputs for e in calls(plain)]
    with mode(), trace(model) as inside:
        model(x)
    assert [e.outputs for e in calls(inside)] == [e.outputs for e in calls(plain)]


def test_autocast_is_seen_and_not_touched():
    model, x = nn.Sequential(nn.Linear(300, 4)), batch(3, 300)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with trace(model) as recording:
            found = model(x)
    assert same_bits(expected, found) and found.dtype is torch.bfloat16
    assert one(recording, "0").outputs[0].digest == digest(found) and one(recording, "0").inputs[0].digest == digest(x)


def test_what_has_no_bytes_is_noted_and_the_run_goes_on():
    class Sparse(nn.Module):
        def forward(self, x):
            return x.to_sparse()

    model = Sparse()
    with trace(model, rows=True) as recording:
        model(torch.eye(3))
    assert calls(recording)[0].outputs[0].note == "layout sparse_coo" and calls(recording)[0].outputs[0].digest is None
    model = nn.Linear(3, 3)
    with trace(model) as recording:
        torch.func.vmap(model)(torch.ones(2, 3))
    assert "torch.func" in calls(recording)[0].inputs[0].note


# --- parameters -------------------------------------------------------------------------------------------------------


def test_parameters_are_recorded_once_per_version():
    model, x = Net(blocks=1), batch()
    step = torch.optim.SGD([model.blocks[0].up.weight], lr=0.1)
    with trace(model) as recording:
        model(x)
        model(x).sum().backward()
        step.step()
        model(x)
    names = [e.path for e in recording.trace.parameters()]
    assert sorted(set(names)) == sorted(name for name, _ in model.named_parameters())
    assert names.count("blocks.0.up.weight") == 2 and len(names) == len(set(names)) + 1
    versions = [e.outputs[0].digest for e in recording.trace.parameters() if e.path == "blocks.0.up.weight"]
    assert versions[1] == digest(model.blocks[0].up.weight) != versions[0]


def test_every_way_to_another_parameter_is_seen():
    model, x = nn.Linear(4, 3, bias=False), torch.randn(2, 4)

    def written():
        model.weight.add_(1)

    def replaced():
        model.weight = nn.Parameter(torch.randn(3, 4))

    def moved():
        model.weight.data = torch.randn(3, 4)

    def added():
        model.bias = nn.Parameter(torch.randn(3))

    with trace(model) as recording, torch.no_grad():
        model(x)
        expected = [("weight", digest(model.weight))]
        for change in (written, replaced, moved):
            change()
            model(x)
            model(x)
            expected.append(("weight", digest(model.weight)))
        added()
        model(x)
    assert [(e.path, e.outputs[0].digest) for e in recording.trace.parameters()] == [
        *expected,
        ("bias", digest(model.bias)),
    ]


def test_buffers_and_parameters_of_modules_that_never_run():
    model = nn.ModuleDict({"used": nn.BatchNorm1d(8), "idle": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    with trace(model) as recording:
        model(batch())
        model(batch())
    names = [e.path for e in recording.trace.parameters()]
    assert names.count("idle.weight") == 1 and names.count("used.weight") == 1 and names.count("used.running_mean") == 2


# --- backward ---------------------------------------------------------------------------------------------------------


def test_backward_records_what_arrives_and_what_each_call_contributes():
    model, x = Net(blocks=1), batch().requires_grad_()
    block = model.blocks[0]
    with trace(model) as recording:
        y = model(x)
        y.sum().backward()
    back = {e.path: e for e in calls(recording, "backward")}
    ones = torch.ones(4, 8)
    assert back["blocks.0"].inputs[0].digest == digest(ones) == back["blocks.0.down"].inputs[0].digest
    # x feeds the sum and the norm: two contributions, in the order in which they are made
    first, second = back["blocks.0"].outputs
    z = x.detach().requires_grad_()
    torch.autograd.backward(block.down(torch.relu(block.up(block.norm(z)))), ones)
    assert first.digest == digest(ones) and second.digest == digest(z.grad)
    assert [r.where for r in back["blocks.0"].outputs] == ["grad.args.0", "grad.args.0#1"]
    assert back["blocks.0.norm"].outputs[0].digest == second.digest
    assert back["blocks.0.up"].outputs[0].digest == back["blocks.0.norm"].inputs[0].digest
    grads = {e.path: e.outputs[0].digest for e in calls(recording, "backward", "gradient")}
    assert next(iter(grads)).startswith("blocks.0.down")
    expected = Net(blocks=1)
    expected(x).sum().backward()
    assert grads == {name: digest(p.grad) for name, p in expected.named_parameters()}


def test_gradients_of_in_place_and_passed_through_inputs():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(3)

    model = nn.Sequential(nn.Linear(8, 8), InPlace(), nn.Identity())
    with trace(model) as recording:
        model(batch()).sum().backward()
    back = {e.path: e for e in calls(recording, "backward")}
    assert back["1"].outputs[0].digest == digest(torch.full((4, 8), 3.0))
    assert back["1"].inputs[0].digest == back["2"].inputs[0].digest == digest(torch.ones(4, 8))
    assert back["2"].outputs == []


def test_a_second_backward_through_the_same_graph_is_an_event_of_its_own():
    model = nn.Sequential(nn.Linear(8, 8))
    with trace(model) as recording:
        y = model(batch()).sum()
        y.backward(retain_graph=True)
        y.backward()
    assert [(e.path, e.call) for e in calls(recording, "backward") if e.path == "0"] == [("0", 0), ("0", 1)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_has_a_phase_of_its_own(reentrant):
    plain, model, x = Net(), Net(reentrant=reentrant), batch().requires_grad_()
    with trace(plain) as expected:
        plain(x).sum().backward()
    with trace(model) as recording:
        model(x).sum().backward()
    assert [(e.path, e.outputs) for e in calls(recording)] == [(e.path, e.outputs) for e in calls(expected)]
    again = {e.path: e for e in calls(recording, "recompute")}
    assert set(again) == {p for p in paths(recording) if p.startswith("blocks")}
    assert again["blocks.1.up"].outputs == one(recording, "blocks.1.up").outputs
    # without reentrance, recomputation ends as soon as the backward has what it needs
    assert ("stopped" in again["blocks.1"].note) is (not reentrant)
    found = {e.path: e.outputs for e in calls(recording, "backward") if e.path.startswith("blocks")}
    assert found == {e.path: e.outputs for e in calls(expected, "backward") if e.path.startswith("blocks")}


# --- errors -----------------------------------------------------------------------------------------------------------


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("no\nsuch row")


def test_an_error_is_located_and_the_trace_is_whole(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), Raises()))
    out = tmp_path / "run.trace"
    with pytest.raises(ValueError, match="no"), trace(model, out):
        model(batch())
    found = read(out)
    assert found.stopped == {"path": "1.1", "error": "ValueError", "message": "no such row"}
    assert [(e.path, bool(e.outputs)) for e in found.phase("forward")] == [
        *(("0", True), ("1.0", True), ("1.1", False), ("1", False), ("(model)", False))
    ]


def test_a_device_that_failed_loses_digests_and_nothing_else(monkeypatch, tmp_path):
    from samebits.verify.trace import pending

    def fails(made):
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(pending, "_to_host", fails)
    model = Net()
    with pytest.raises(RuntimeError, match="device-side"), trace(model, tmp_path / "run.trace", rows=True):
        model(batch())
    with pytest.raises(KeyError), trace(model, tmp_path / "mine.trace"):
        model(batch())
        raise KeyError  # the run's own error is the one that is seen
    for name in ("run", "mine"):
        found = read(tmp_path / f"{name}.trace")
        assert len(found.phase("forward")) == 9 and is_clean(model)
        assert {(r.digest, r.note) for e in found.events for r in e.outputs} == {
            (None, "lost: RuntimeError when it was read")
        }


def test_an_interrupt_is_located():
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Sequential(Interrupted()))
    recording = trace(model)
    with pytest.raises(KeyboardInterrupt), recording:
        model(batch())
    assert recording.trace.stopped["path"] == "0.0"


def test_an_error_that_the_model_handles_does_not_confuse_the_order():
    class Fallback(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = nn.Sequential(Raises()), nn.Linear(8, 8)

        def forward(self, x):
            try:
                return self.bad(x)
            except ValueError:
                return self.good(x)

    model = Fallback()
    with trace(model) as recording:
        model(batch())
    assert paths(recording) == ["bad.0", "bad", "good", "(model)"]
    assert one(recording, "good").parent == one(recording, "(model)").start
    assert one(recording, "bad.0").note == "ended by ValueError" and one(recording, "good").note == ""
    assert recording.trace.stopped is None


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_patterns_choose_modules():
    model = Net()
    with trace(model, modules="blocks.1*") as recording:
        model(batch()).sum().backward()
    assert paths(recording) == [*(f"blocks.1.{n}" for n in ("norm", "up", "down")), "blocks.1", "(model)"]
    assert {p.split(".")[1] for p in paths(recording, "backward", "gradient")} == {"1"}
    assert {e.path.split(".")[1] for e in recording.trace.parameters()} == {"1"}
    with trace(model, gradients=False, parameters=False) as recording:
        model(batch()).sum().backward()
    assert {(e.kind, e.phase) for e in recording.trace.events} == {("module", "forward")}


def test_rows_and_batch_axis():
    class Transposed(nn.Module):
        def forward(self, x):
            return x.transpose(0, 1)

    model, x = Transposed(), torch.randn(3, 5, 7)
    with trace(model, rows=2) as recording:
        y = model(x)
    record = calls(recording)[0].inputs[0]
    assert record.row_shape == (3, 5) and record.row_count == 15 and record.one_row == (7,)
    assert [record.row(i) for i in range(15)] == [digest(row) for row in x.flatten(0, 1)]
    with trace(model, rows=True, batch_axis=1) as recording:
        model(x)
    given, made = calls(recording)[0].inputs[0], calls(recording)[0].outputs[0]
    assert given.row_shape == (5,) and given.one_row == (3, 7)
    assert given.row(2) == digest(x[:, 2]) and given.digest == digest(x) and made.row(1) == digest(y[:, 1])


def test_full_tensors_are_kept(tmp_path):
    model, x = Net(blocks=1), batch()
    with trace(model, tmp_path / "run.trace", tensors="blocks.0.u*") as recording:
        y = model(x)
        x.zero_(), y.detach().zero_()
    found = read(tmp_path / "run.trace")
    kept = [r for e in found.events for r in (*e.inputs, *e.outputs) if r.kept]
    assert [r.where for r in kept] == ["blocks.0.up.weight", "blocks.0.up.bias", "args.0", "output"]
    for record in kept:
        tensor = found.tensor(record.kept)
        assert digest(tensor) == record.digest and tuple(tensor.shape) == record.shape
        assert same_bits(tensor, recording.trace.tensor(record.kept))
    with pytest.raises(KeyError):
        found.tensor("nothing")


def test_a_dtype_that_no_file_can_hold_is_said(tmp_path):
    class Wide(nn.Module):
        def forward(self, x):
            return x.to(torch.complex128), x.to(torch.float8_e5m2)

    model = Wide()
    with trace(model, tmp_path / "run.trace", tensors=True) as recording:
        model(batch())
    wide, eighth = calls(recording)[0].outputs
    assert wide.kept is None and "complex128" in wide.note and wide.digest == digest(batch().to(torch.complex128))
    assert same_bits(recording.trace.tensor(eighth.kept), batch().to(torch.float8_e5m2))


def test_kept_tensors_are_written_in_shards(tmp_path, monkeypatch):
    from samebits.verify.trace import keeping

    monkeypatch.setattr(keeping, "SHARD_BYTES", 400)
    model = Net()
    with trace(model, tmp_path / "run.trace", tensors=True) as recording:
        model(batch()).sum().backward()
    found = read(tmp_path / "run.trace")
    assert len(found.tensor_files) > 5
    kept = [r for e in found.events for r in (*e.inputs, *e.outputs) if r.kept]
    assert len(kept) > 50 and all(digest(recording.trace.tensor(r.kept)) == r.digest for r in kept)


def test_hooks_of_graphs_that_are_gone_are_dropped(monkeypatch):
    from samebits.verify.trace import gradients

    monkeypatch.setattr(gradients, "PRUNE", 8)
    model, most = Net(), 0
    with trace(model) as recording:
        for _ in range(20):
            model(batch()).sum().backward()
            most = max(most, len(recording._attached._gradients._handles))
    assert most < 150 and len(calls(recording, "backward")) == 20 * 9
    assert is_clean(model)


def test_many_pending_digests_are_read_in_between(monkeypatch):
    from samebits.verify.trace import pending

    model, x = Net(), batch()
    with trace(model, rows=True) as expected:
        model(x)
    monkeypatch.setattr(pending, "BOUND", 500)
    with trace(model, rows=True) as recording:
        model(x)
    assert recording.trace.events == expected.trace.events


def test_kernel_names():
    model = Net(blocks=1)
    with trace(model, kernels=True) as recording:
        model(batch())
    assert one(recording, "blocks.0.up").kernels == ["aten::linear"]
    assert one(recording, "blocks.0").kernels == ["aten::relu", "aten::add"]


# --- modules of other kinds -------------------------------------------------------------------------------------------


def test_compiled_modules_are_opaque():
    model, x = Net(blocks=3), batch().requires_grad_()
    with trace(model) as expected:
        model(x).sum().backward()
    model.zero_grad()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1].compile(backend="eager")
    with trace(model) as recording:
        model(x).sum().backward()
    assert [e.path for e in calls(recording) if e.depth == 1] == [f"blocks.{i}" for i in range(3)]
    assert not [p for p in paths(recording) if p.startswith(("blocks.0.", "blocks.1."))]
    for i in range(3):
        mine, plain = one(recording, f"blocks.{i}"), one(expected, f"blocks.{i}")
        assert (mine.cls, mine.inputs, mine.outputs) == ("Block", plain.inputs, plain.outputs)
        assert ("compiled" in mine.note) is (i < 2)
    names = {e.path for e in recording.trace.parameters()}
    assert names == {e.path for e in expected.trace.parameters()}
    assert set(paths(recording, "backward", "gradient")) == set(paths(expected, "backward", "gradient"))
    compiled = model.blocks[1]._compiled_call_impl
    with trace(model):
        assert model.blocks[1]._compiled_call_impl is not compiled
    assert model.blocks[1]._compiled_call_impl is compiled


def test_compiled_functions_that_call_modules_are_opaque():
    model, x = Net(blocks=1), batch()
    step = torch.compile(lambda t: model.blocks[0](t) * 2, backend="eager", fullgraph=True)
    expected = step(x)
    with trace(model) as recording:
        found = step(x)
        model(x)
    assert same_bits(found, expected) and paths(recording)[-1] == "(model)" and len(paths(recording)) == 5
    assert same_bits(step(x), expected)


def test_data_parallel_is_refused():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        trace(nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))).__enter__()


def test_every_model_is_found_when_none_is_named():
    first, second = nn.Sequential(nn.Linear(8, 8)), Block(8)
    before = nn.Module.__call__
    with trace() as recording:
        second(first(batch()))
        nn.ReLU()(first(batch()))
    assert paths(recording) == [
        *("0", "(model)", "Block.norm", "Block.up", "Block.down", "Block", "0", "(model)", "ReLU")
    ]
    assert nn.Module.__call__ is before and is_clean(first) and is_clean(second)


def test_models_that_share_a_module_record_it_once_per_call():
    inner = nn.Linear(8, 8)
    outer = nn.Sequential(inner)
    with trace() as recording:
        outer(inner(batch())).sum().backward()
    assert paths(recording) == ["(model)", "(model)", "Sequential"]
    assert sorted(paths(recording, "backward", "gradient")) == ["bias", "weight"]


def test_operators_are_recorded_inside_their_module():
    class Uses(nn.Module):
        def forward(self, x, gamma):
            y, residual = samebits.rmsnorm_residual(x, gamma, eps=1e-6)
            return y.float() + residual.float()

    model = Uses()
    x, gamma = torch.randn(3, 16).bfloat16().requires_grad_(), torch.ones(16, requires_grad=True)
    with samebits.policy("silent"), trace(model, rows=True) as recording:
        model(x, gamma).sum().backward()
    forward, backward = one(recording, "samebits::rmsnorm_residual", kind="operator"), None
    (backward,) = calls(recording, "backward", "operator")
    assert forward.parent == one(recording, "(model)").start and forward.cls == "reference"
    assert forward.note == "contract ascending"
    assert [r.where for r in forward.inputs][:2] == ["x", "gamma"] and forward.inputs[0].digest == digest(x)
    assert backward.path == "samebits::rmsnorm_residual_backward"
    assert digest(gamma.grad) in [r.digest for r in backward.outputs]


# --- a GPU ------------------------------------------------------------------------------------------------------------


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.gpu
def test_a_gpu_gives_the_trace_of_the_cpu():
    model, x = Doubles(), batch(600, 1000).bfloat16()
    with trace(model, rows=True) as cpu:
        model(x)
    with trace(model, rows=True) as gpu, torch.cuda.stream(torch.cuda.Stream()):
        model(x.cuda())
    for one_, other in zip(
        calls(cpu)[0].inputs + calls(cpu)[0].outputs, calls(gpu)[0].inputs + calls(gpu)[0].outputs, strict=True
    ):
        assert one_.digest == other.digest and one_.rows == other.rows


@pytest.mark.gpu
def test_what_is_captured_has_no_value_yet():
    model, x, graph = Doubles(), batch().cuda(), torch.cuda.CUDAGraph()
    with trace(model) as recording:
        model(x)
        with torch.cuda.graph(graph):
            model(x)
    _, captured = calls(recording)
    assert captured.inputs[0].digest == digest(x), "known from before, and nothing runs"
    assert captured.outputs[0].digest is None and "captured" in captured.outputs[0].note


# --- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"model": 3}, TypeError, "torch.nn.Module"),
        ({"rows": "yes"}, TypeError, "rows"),
        ({"rows": -1}, ValueError, "rows"),
        ({"batch_axis": -1}, ValueError, "batch_axis"),
        ({"batch_axis": True}, TypeError, "batch_axis"),
        ({"modules": [1]}, TypeError, "modules"),
        ({"out": "/no/such/folder/run.trace"}, FileNotFoundError, "no folder"),
    ],
)
def test_misuse_is_refused_before_anything_runs(arguments, error, word):
    with pytest.raises(error, match=word):
        trace(**{"model": nn.Linear(1, 1)} | arguments)


def test_a_trace_is_opened_once_at_a_time():
    recording = trace(Net())
    with recording, pytest.raises(RuntimeError, match="open already"):
        recording.__enter__()
