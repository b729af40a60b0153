"""A tensor is read once as long as nothing was written to it, and every write that torch counts is seen."""

from __future__ import annotations

import weakref

import pytest
import torch
from drift.models import Net, batch
from torch import nn

import samebits
from samebits.verify.trace import digest as module
from samebits.verify.trace import recorder, reuse, trace
from samebits.verify.trace.digest import digest
from samebits.verify.trace.layout import Layouts
from samebits.verify.trace.pending import Reading


class Does(nn.Module):
    """Calls a function as a module."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, *given, **named):
        return self.what(*given, **named)


@pytest.fixture
def reads(monkeypatch):
    """The tensors that were read, by shape."""
    seen, original = [], module.vectors

    def counted(tensor, lead=0, axis=0):
        seen.append(tuple(tensor.shape))
        return original(tensor, lead, axis)

    monkeypatch.setattr(module, "vectors", counted)
    return seen


def digests(recording, path):
    """Of the inputs and outputs of every call of a module, as they were made."""
    return [
        ([r.digest for r in e.inputs], [r.digest for r in e.outputs])
        for e in sorted(recording.trace.events, key=lambda e: e.start)
        if (e.kind, e.phase, e.path) == ("module", "forward", path)
    ]


def test_a_tensor_is_read_once(reads):
    model, x = nn.Sequential(nn.Sequential(nn.Linear(8, 6)), nn.Linear(6, 5)), batch(4, 8)
    with trace(model) as recording:
        y = model(x)
        model(x)
    assert reads.count((4, 8)) == 1 and reads.count((4, 6)) == 2 and reads.count((4, 5)) == 2
    assert digests(recording, "(model)") == [([digest(x)], [digest(y)])] * 2
    reads.clear()
    with trace(model, reuse=False) as again:
        model(x)
    assert reads.count((4, 8)) == 3
    assert digests(again, "(model)") == digests(recording, "(model)")[:1]
    assert not again.trace.header["options"]["reuse"] and recording.trace.header["options"]["reuse"]


def test_a_parameter_is_read_once_for_module_and_operator(reads):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.rand(24))

        def forward(self, x):
            return samebits.rmsnorm_residual(x, self.gain, eps=1e-6)[0]

    model, x = Norm(), torch.randn(3, 24).bfloat16()
    with trace(model) as recording:
        model(x)
        with torch.no_grad():
            model.gain.add_(1)
        model(x)
    assert reads.count((24,)) == 2
    first, second = [e for e in recording.trace.events if e.kind == "operator"]
    assert first.inputs[0].digest == second.inputs[0].digest == digest(x)
    assert second.inputs[1].digest == digest(model.gain) != first.inputs[1].digest


def test_recordings_with_and_without_are_equal():
    model = Net(32, 3)

    def run():
        x = batch(40, 32).requires_grad_()
        (model(x) ** 2).sum().backward()
        model.zero_grad()

    with trace(model) as one:
        run()
    with trace(model, reuse=False) as other:
        run()
    assert [e.to_json() for e in one.trace.events] == [e.to_json() for e in other.trace.events]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x[1:2].zero_(),
        lambda x: x.detach().view(-1)[:3].mul_(2),
        lambda x: x.copy_(torch.ones(4, 8)),
        lambda x: torch.add(torch.ones(4, 8), 2, out=x),
    ],
)
def test_a_write_between_two_calls_is_seen(write):
    model, x = Does(lambda x: None), batch(4, 8)
    before = digest(x)
    with trace(model) as recording, torch.no_grad():
        model(x)
        write(x)
        model(x)
    assert digests(recording, "(model)") == [([before], []), ([digest(x)], [])] and digest(x) != before


def test_a_write_that_torch_does_not_count_is_seen_where_the_call_returns_it():
    """What a kernel does that is given an address alone. Behind the call it is seen without reuse only, as the README says."""

    def write(x, back):
        array = x.numpy()
        array += 1
        return x if back else None

    model, x = Does(write), torch.arange(32.0).view(4, 8)
    before, returned = digest(x), digest(x + 1)
    with trace(model) as recording:
        model(x, True)
        model(x, False)
        model(x, False)
    assert digests(recording, "(model)")[0] == ([before], [returned])
    assert [given for (given,), _ in digests(recording, "(model)")[1:]] == [returned, returned]
    with trace(model, reuse=False) as recording:
        model(x, False)
        model(x, False)
    first, second = [given for (given,), _ in digests(recording, "(model)")]
    assert second == digest(x - 1) != first


def test_what_a_call_returns_is_not_read_again_where_torch_alone_ran(reads):
    """A dropout that drops nothing hands on what it was given; a member, a hook or another forward may have written to it."""
    model, x = nn.Sequential(nn.Dropout(), nn.ReLU(inplace=True)).eval(), batch(4, 8)

    def count():
        reads.clear()
        with trace(model, parameters=False) as recording:
            model(x.clone())
        found = len(reads)
        assert digests(recording, "0")[0] == ([digest(x)], [digest(x)])
        assert digests(recording, "1")[0][1] == [digest(x.relu())] == digests(recording, "(model)")[0][1]
        return found

    assert count() == 1 + 0 + 1, "the input, and what the second writes"
    handle = model[0].register_forward_hook(lambda module, args, output: None)
    assert count() == 1 + 1 + 1
    handle.remove()
    model[0].forward = lambda x: x
    assert count() == 1 + 1 + 1
    del model[0].forward
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    assert count() == 1 + 1 + 1
    handle.remove()
    model[0].add_module("member", nn.Identity())
    assert count() == 1 + 1 + 1


def test_memory_that_is_used_again_is_read_again():
    model, addresses, expected = Does(lambda x: None), set(), []
    with trace(model) as recording:
        for i in range(50):
            x = torch.full((1 << 12,), float(i))
            addresses.add(x.data_ptr())
            expected.append(digest(x))
            model(x)
            gone = weakref.ref(x)
            del x
            assert gone() is None
    assert len(addresses) < 50, "the allocator gave every tensor another address: this test shows nothing"
    assert [given for (given,), _ in digests(recording, "(model)")] == expected


def test_other_views_of_the_same_memory_are_read():
    model = Does(lambda *given: None)
    x, z = torch.arange(36.0).view(6, 6), torch.randn(4, dtype=torch.complex64)
    views = (
        *(x, x[:2], x[2:4], x[:, :2], x.t(), x.view(4, 9), x.view(torch.int32), x.view(torch.int16)),
        *(z, z.conj(), z.imag, z.conj().imag),
    )
    with trace(model, rows=True) as recording:
        model(*views)
        model(*reversed(views))
    for event in recording.trace.phase("forward"):
        given = views if event.call == 0 else views[::-1]
        assert [r.digest for r in event.inputs] == [digest(v) for v in given]
        assert [r.row_count for r in event.inputs] == [len(v) if v.dim() > 1 else v.numel() for v in given]


def test_the_same_bytes_in_another_shape_are_not_read_again(reads):
    """Heads of a projection, rows of a batch: a digest is of bytes."""
    model, x = Does(lambda *given: None), batch(4, 8)
    views = (x, x.view(2, 2, 8), x.view(-1), x.view(torch.int32), x[:2], x[2:], x.t())
    with trace(model) as recording:
        model(*views)
    assert reads == [(4, 8), (2, 8), (2, 8), (8, 4)]
    (event,) = recording.trace.phase("forward")
    assert [r.digest for r in event.inputs] == [digest(v) for v in views]
    assert [r.shape for r in event.inputs] == [tuple(v.shape) for v in views]


def test_a_tensor_of_another_class_is_recorded():
    """A parameter that a module returns by itself: nobody asks for its truth value."""
    parameter = nn.Parameter(torch.arange(6.0))
    model = Does(lambda given: parameter)
    with trace(model) as recording:
        model(parameter)
        model(given=parameter)
    for event in recording.trace.phase("forward"):
        assert [r.digest for r in (*event.inputs, *event.outputs)] == [digest(parameter)] * 2
        assert event.outputs[0].where == "output"


def test_a_tensor_that_was_made_another_one_is_read_again(reads):
    """By ``.data``, which counts nothing: other memory, and another look at the same memory."""
    model, x = Does(lambda x: None), torch.arange(36.0).view(6, 6)
    looks = [x, torch.randn(6, 6)]
    looks += [looks[1].view(torch.int32), looks[1].t(), looks[1].view(4, 9), looks[1][:3]]
    y = torch.empty(0)
    with trace(model) as recording:
        for look in looks:
            y.data = look
            model(y)
    assert len(reads) == 4, "two of them show bytes that were read, in the same order"
    events = sorted(recording.trace.phase("forward"), key=lambda event: event.start)
    assert [event.inputs[0].digest for event in events] == [digest(look) for look in looks]
    assert [event.inputs[0].stride for event in events] == [look.stride() for look in looks]
    assert [event.inputs[0].dtype for event in events] == [str(look.dtype).removeprefix("torch.") for look in looks]


def test_tensors_without_a_count_are_always_read(reads):
    model = Does(lambda x: x)
    with trace(model) as recording, torch.inference_mode():
        x = torch.ones(7)
        model(x)
        x += 1
        model(x)
    assert reads == [(7,)] * 4
    assert digests(recording, "(model)")[1] == ([digest(x)], [digest(x)])


def test_nothing_is_known_from_before_among_several_ranks(reads, monkeypatch):
    """An all-reduce writes in place and is not counted."""
    model, x = nn.Sequential(nn.Identity(), nn.Identity()), batch(4, 8)
    with trace(model):
        model(x)
        assert len(reads) == 1 + 1  # what the model returns is always read
        monkeypatch.setattr(recorder, "rank_and_world", lambda: (0, 2))
        model(x)
    assert len(reads) == 2 + 6


def test_storages_that_are_gone_are_dropped(monkeypatch):
    monkeypatch.setattr(reuse, "PRUNE", 8)
    known, alive, layouts = reuse.Known(), torch.ones(3), Layouts()

    def place_of(tensor, lead=0):
        return reuse.place_of(tensor, layouts.of(tensor), lead)

    reading, place = Reading(size=12), place_of(alive)
    known.add(alive, place, 1, reading)
    for i in range(100):
        other = torch.full((4,), float(i))
        known.add(other, place_of(other), 2 + i, Reading(size=16))
        known.seen[(*place_of(other)[:2], other.shape)] = layouts.of(other), reading
    assert len(known.alive) < 20 and len(known.readings) < 20 and len(known.seen) < 20
    assert known.find(place, 0, 0) is reading
    assert known.find(place, 0, 1) is None and known.find(place, 1, 0) is None
    assert known.find(place_of(alive, 1), 0, 0) is None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_has_no_digest_has_none_the_second_time_either():
    model, eye = Does(lambda *given: None), torch.eye(3)
    given = {
        "a nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "layout sparse_coo": eye.to_sparse(),
        "layout _mkldnn": eye.to_mkldnn(),
        "a quantized tensor": torch.quantize_per_tensor(eye, 0.1, 0, torch.quint8),
        "no data": torch.empty(3, device="meta"),
    }
    with trace(model) as recording:
        for _ in range(2):
            model(*given.values(), eye)
    for event in recording.trace.phase("forward"):
        assert [(r.digest, r.note) for r in event.inputs[:-1]] == [(None, why) for why in given]
        assert event.inputs[-1].digest == digest(eye)
