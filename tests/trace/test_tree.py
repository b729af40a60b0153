"""The GPU's kernel of the digest: its bits on a CPU, by emulation, its machine code, and its bits on a GPU."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from drift.models import Net

from samebits.audit import compile as audit
from samebits.audit.build import Build
from samebits.audit.judge import judge
from samebits.audit.limits import Limits
from samebits.emulate.launch import Emulator, KernelFault, _Fences
from samebits.runtime import nvrtc
from samebits.verify.trace import digest, layout, probe, trace, tree, vectors

BY_VALUE = "const __grid_constant__ Parts parts"


@dataclass
class Emulated(Emulator):
    """The kernel on the CPU. The emulator passes no structures by value, so the table of parts is a tensor for it; what the parts
    point to lies between fences."""

    text: str = field(default_factory=lambda: nvrtc.source_text(tree.KERNEL))
    launches: int = 0

    def start(self, todo, index):
        assert self.text.count(BY_VALUE) == 1
        self.sources[tree.KERNEL] = self.text.replace(BY_VALUE, "const Parts* const table").replace(
            "  __shared__", "  const Parts& parts = *table;\n  __shared__", 1
        )
        with contextlib.ExitStack() as stack:
            fences, words = _Fences(stack, not self.descending), vectors.Words()
            fences.hold(tuple(tensor for job in todo if job.part.tiles for tensor in (job.data, job.into.store)))
            tiles = vectors.fill(words, todo, lambda tensor: fences.value(tensor).value)
            if tiles:
                self.launches += 1
                plan, keys = vectors.grid(tiles, 0), vectors.keys(0, todo[0].part.level)
                self.launch(plan, torch.frombuffer(words, dtype=torch.uint8), keys)
                fences.copy_back(plan)


@pytest.fixture
def emulated(monkeypatch):
    """On a GPU of two multiprocessors, of which the memory is full of nothing in particular."""
    emulator, keys = Emulated(), tree.arranged_keys()
    monkeypatch.setattr(vectors, "start", emulator.start)
    monkeypatch.setattr(vectors, "_empty", lambda index, count: torch.full((count, 16), -7, dtype=torch.int32))
    monkeypatch.setattr(vectors, "keys", lambda index, level: keys[level - 1 :])
    monkeypatch.setattr(vectors, "_current", lambda index: 0)
    monkeypatch.setattr(vectors, "_processors", lambda index: 2)
    monkeypatch.setattr(vectors, "SLAB", 512)
    monkeypatch.setattr(vectors, "SCRATCH", 512)
    vectors.grid.cache_clear()
    yield emulator
    vectors.grid.cache_clear()


@pytest.fixture
def recorded(emulated, monkeypatch):
    """Traces take tensors on the CPU to be on that GPU."""
    monkeypatch.setattr(layout.probe, "usable", lambda device: True)
    monkeypatch.setattr(layout, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(digest, "capturing", lambda: False)


@pytest.fixture
def small_last(monkeypatch):
    """One vector is left, so that small tensors take several launches."""
    cached = (tree.part, tree.of_bytes, tree.of_rows)
    for module in (tree, vectors, digest):
        monkeypatch.setattr(module, "LAST", 1)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@functools.cache
def drawn(count):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-128, 128, (count,), generator=generator, dtype=torch.int8)


def data(*shape):
    """Bytes that are the same every time; the first chunks are as large as bytes can be."""
    values = drawn(math.prod(shape)).clone()
    values[:2048] = -128
    return values.view(shape)


def launched(*tensors, lead=0, axis=0):
    """What the kernel leaves of tensors that are read together: of each, of its rows, and the bytes of a row."""
    memories, todo, shared, found = vectors.Memories(), [], [], []
    for tensor in tensors:
        into = vectors.Vectors()
        whole, rows, width = vectors.jobs(tensor, into, lead, axis)
        todo += [job for job in (rows, whole) if job is not None]
        shared += [(rows.into, into)] if whole is None else []
        found.append((into, None if rows is None else rows.into, width))
    memories.launch(todo, shared)
    memories.finish()
    return [(whole.value, None if rows is None else rows.value, width) for whole, rows, width in found]


def same(*tensors, lead=0, axis=0):
    """Whether both ways give the same vectors of the tensors and of their rows."""
    for tensor, ours in zip(tensors, launched(*tensors, lead=lead, axis=axis), strict=True):
        theirs = digest.vectors(tensor, lead, axis)
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            if (a is None) != (b is None) or (
                a is not None and (a.shape != b.shape or not torch.equal(a.cpu(), b.cpu()))
            ):
                return False
        if ours[2] != theirs[2]:
            return False
    return True


SIZES = (0, 1, 15, 16, 1023, 1024, 1025, 2**14 - 1, 2**14, 2**14 + 1, 2**18 - 1, 2**18, 2**18 + 1)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_alignments(emulated, size):
    x = data(size + 3)
    emulated.descending = size % 2 == 1
    assert same(x[:size], x[1 : size + 1], x[2 : size + 2], x[3:])
    assert emulated.launches == (size > 0)


def test_three_levels(emulated):
    assert same(data(2**22 + 1025)[1:])
    assert emulated.launches == 2


def test_many_tensors_at_once(emulated, small_last, monkeypatch):
    """More than one launch takes, and more large ones than scratch holds: the first are finished before the others are begun."""
    monkeypatch.setattr(vectors, "SCRATCH", 8)
    x = data(2**18)
    tensors = [x[i * 3000 : i * 3000 + size] for i, size in enumerate((5, 2000, 2**16 + 1, 0, 40000) * 7)]
    assert same(*tensors) and same(*tensors[:20])
    assert emulated.launches == 3 + 2 + 5, "five times levels were missing: scratch was full, or all was launched"


ROWS = (
    *((5, 1024), (300, 1024), (40, 1000), (7, 1344), (3, 20 * 1024 + 5), (3, 257 * 1024 + 16), (2, 256 * 1024 + 5)),
    *((0, 4), (4, 0), (6,), (7, 3, 100), (2, 3, 2048)),
)


@pytest.mark.parametrize("shape", ROWS)
def test_rows(emulated, shape):
    x = data(*shape)
    assert same(x, lead=1)
    if len(shape) == 3:
        assert same(x, lead=2) and same(x, lead=1, axis=1)
    if shape[1:] == (3, 100):
        assert same(x, lead=1, axis=2) and same(x, lead=2, axis=1)


def test_layouts(emulated):
    x = data(40, 3, 2048)
    apart, joined = x[:, 1, :1024], (x[:, 1, :1008], x[:, 2, 2032:], x[:, 0, 1:1009], x[1:, 1, :48])
    for view in (apart, x[..., :1024], x[:, 1], x[:1, 0, :1024].expand(30, 1024), x[:, :1].transpose(0, 1), *joined):
        assert tree.of_bytes(view.shape, view.stride(), 1) is not None, "read where it lies"
        assert same(view) and same(view, lead=1)
    for view in (x[:, 1, :1000], x[::3, :, :1024], x.transpose(0, 1), x[..., ::2], x[0].t()):
        assert tree.of_bytes(view.shape, view.stride(), 1) is None, "copied"
        assert same(view) and same(view, lead=1)
    z = torch.randn(9, 700, dtype=torch.complex64).conj()
    assert same(z) and same(z.imag, lead=1)


def test_several_launches(emulated, small_last):
    x = data(300 * 1024 + 5)
    assert tree.of_bytes(x.shape, x.stride(), 1).each == 19
    assert same(x) and same(data(2, 290 * 1024)[:, 1:], lead=1) and same(data(30, 1024), lead=1)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("top[2][4] = {}", "top[2][4] = {1}"),
        ("number + TILE <= part.width / CHUNK", "number <= part.width / CHUNK"),
        ("    __syncwarp();\n    int top", "    int top"),
        ("left > 4 * i + j", "left >= 4 * i + j"),
        ("  __syncthreads();\n", ""),
        ("at -= part.width) from", "at -= part.width + 16) from"),
        ("tile >= parts.part[at + 1].first", "tile > parts.part[at + 1].first"),
        ("tree * part.tree_stride", "0"),
    ],
)
def test_a_fault_is_found(emulated, small_last, right, wrong):
    assert emulated.text.count(right) == 1
    emulated.text = emulated.text.replace(right, wrong)
    rows = data(4, 2048)
    tried = (((data(1025), rows[:, 16:416]), 0), ((data(5003)[:5001], data(40000)), 0), ((rows[:, :2000],), 1))
    for emulated.descending in (False, True):
        for tensors, lead in tried:
            try:
                if not same(*tensors, lead=lead):
                    return
            except KernelFault:
                return
    raise AssertionError("nothing saw it")


@pytest.mark.parametrize("arch", audit.ARCHES)
def test_machine_code_is_clean(arch):
    build = Build(tree.KERNEL, ())
    read = audit.read(audit.compile_build(build, arch))
    assert judge(read.ptx, read.sass, Limits()) == ()
    assert read.kernel.resources.registers <= 64
    assert any(i.opcode.startswith("IMMA.16832.S8.S8") for i in read.kernel.instructions)


def test_what_is_too_large_is_refused():
    assert tree.of_rows((70000, 2**19), (2**19, 1), 1, 1).trees == 70000
    assert tree.of_bytes((2**38,), (1,), 1).each == 2**24
    with pytest.raises(RuntimeError, match="more bytes than"):
        tree.of_bytes((2**38 + 1,), (1,), 1)


def test_a_trace_has_the_same_digests(emulated, monkeypatch):
    model, x = Net(32, 2), torch.randn(40, 32)

    def run():
        with trace(model, rows=True) as recording:
            model(x.clone().requires_grad_()).sum().backward()
            model.zero_grad()
        return [event.to_json() for event in recording.trace.events]

    expected = run()
    assert not emulated.launches
    monkeypatch.setattr(layout.probe, "usable", lambda device: True)
    monkeypatch.setattr(layout, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(digest, "capturing", lambda: False)
    monkeypatch.setattr(digest, "vectors", None)
    assert run() == expected
    assert emulated.launches > 20


def test_under_capture_nothing_is_launched_and_what_is_known_stays_known(emulated, recorded, monkeypatch):
    captured = False
    monkeypatch.setattr(digest, "capturing", lambda: captured)
    model, x = torch.nn.ReLU(), torch.ones(5)
    with trace(model) as recording:
        model(x)
        captured, launches = True, emulated.launches
        model(x)
        assert emulated.launches == launches
        captured = False
        model(x)
    first, second, third = recording.trace.phase("forward")
    assert second.inputs == first.inputs and second.inputs[0].digest == digest.digest(x)
    assert second.outputs[0].digest is None and second.outputs[0].note == digest.CAPTURED
    assert third.outputs == first.outputs


def test_another_look_at_memory_that_was_written_to_is_read(recorded):
    """The same bytes in another shape; the second write is one that torch does not count, in a call that returns the look."""

    class Writes(torch.nn.Module):
        def forward(self, x):
            x.detach().numpy()[0] += 1
            return x.view(2, 3)

    model, x, gone = torch.nn.Sequential(torch.nn.Flatten(0), Writes()), torch.zeros(6), torch.zeros(6)
    gone.untyped_storage().resize_(0)
    with trace(model) as recording:
        model(torch.zeros(3, 2))  # shapes are known from now on
        model(x)
        x.add_(1)
        model(x.view(3, 2))
        with contextlib.suppress(IndexError, ValueError, RuntimeError):
            model(gone)
    events = sorted(recording.trace.phase("forward"), key=lambda event: event.start)[3:]
    first, flat, writes, second, _, again, third, *_ = events
    zeros, ones = torch.zeros(6), torch.ones(6)
    zeros[0], ones[0] = 1, 2
    assert flat.outputs[0].digest == digest.digest(torch.zeros(6))
    assert writes.outputs[0].digest == first.outputs[0].digest == digest.digest(zeros)
    assert second.inputs[0].digest == digest.digest(ones)
    ones[0] = 3
    assert again.outputs[0].digest == second.outputs[0].digest == digest.digest(ones)
    assert third.inputs[0].digest is None and "given back" in third.inputs[0].note


def test_a_negated_look_is_not_the_tensor(recorded):
    model, x = torch.nn.Flatten(0), torch.randn(5)
    with trace(model) as recording:
        for look in (x, torch._neg_view(x), x + 1, torch._neg_view(x - 1)):
            model(look)
    found = [event.inputs[0].digest for event in recording.trace.phase("forward")]
    assert found == [digest.digest(look) for look in (x, -x, x + 1, 1 - x)]


def test_memory_that_was_given_back_is_not_read(emulated):
    x = data(3000)
    view = x[5:]
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="given back"):
        vectors.jobs(view, vectors.Vectors())


def test_a_launch_that_fails_is_said_and_not_remembered(recorded, monkeypatch):
    def refused(todo, index):
        raise RuntimeError("out of\nmemory")

    model, x = torch.nn.Identity(), torch.ones(5)
    with trace(model) as recording:
        with monkeypatch.context() as patch:
            patch.setattr(vectors, "start", refused)
            model(x)
        model(x)
    first, second = recording.trace.phase("forward")
    assert first.inputs[0].digest is None and first.inputs[0].note == "not read: RuntimeError: out of memory"
    assert second.inputs[0].digest == digest.digest(x) == second.outputs[0].digest


# --- whether a device can -----------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """A CUDA device as far as :func:`probe.usable` looks."""
    monkeypatch.setattr(probe.machine, "missing", lambda backend: None)
    monkeypatch.setattr(probe.machine, "info", lambda device: probe.machine.H200)
    probe.usable.cache_clear()
    yield torch.device("cuda", 0)
    probe.usable.cache_clear()


def test_a_device_that_gives_other_sums_is_not_used(emulated, small_last, device, monkeypatch):
    cpu = torch.device("cpu")
    assert probe._difference(cpu) is None
    emulated.text = emulated.text.replace("top[2][4] = {}", "top[2][4] = {1}")
    why = probe._difference(cpu)
    assert "other sums for" in why
    monkeypatch.setattr(probe, "_difference", lambda device: why)
    with pytest.warns(UserWarning, match="by torch: the kernel gives other sums"):
        assert not probe.usable(device)


def test_a_device_that_cannot_is_told_once(device, monkeypatch):
    def fails(device):
        raise nvrtc.CompileError("no such\narchitecture")

    monkeypatch.setattr(probe, "_difference", fails)
    with pytest.warns(UserWarning, match="cuda:0 are made slowly, by torch: CompileError: no such architecture"):
        assert not probe.usable(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not probe.usable(device) and not probe.usable(torch.device("cpu"))


# --- on a GPU -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    probe.usable.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back unseen
        assert probe.usable(device)
    return device


@pytest.mark.gpu
def test_the_kernel_has_the_bits_of_torch(gpu):
    x = torch.randint(-128, 128, (70 * 2**20 + 7,), device=gpu, dtype=torch.int8)
    for begin in (0, 1, 2, 3, 4):
        sizes = (*SIZES, 5 * 2**20 + 3, 2**22, 2**22 + 1, 2**26, 2**26 + 1, 70 * 2**20 + 3)
        assert same(*(x[begin : begin + size] for size in sizes))
        assert all(same(x[begin : begin + size]) for size in sizes)
    for shape in ROWS:
        rows = x[: math.prod(shape)].view(shape)
        assert same(rows, lead=1) and same(rows, lead=len(shape) - 1, axis=1 if len(shape) == 2 else 0)
    y = x[: 600 * 3000 * 2].view(torch.bfloat16).view(600, 3000)
    for view in (y, y[:, 1:], y.t(), y[::7, :5], y[:, :1024], y[:, 512:1536], y[:, :1496], y[:, 8:16], y[1:], y[3, 5:]):
        assert same(view) and same(view, lead=min(1, view.dim() - 1))
    for dtype in (torch.float64, torch.float32, torch.float16, torch.float8_e4m3fn, torch.int64, torch.complex64):
        assert same(x[: 2**14].view(dtype)[3:], lead=1)
    assert same((x[:4099] & 1).bool(), torch.randn(9, 700, dtype=torch.complex64, device=gpu).conj())


@pytest.mark.gpu
def test_scratch_is_used_again(gpu, monkeypatch):
    """Scratch that holds three of them; the third level of each is there before its place is written over."""
    monkeypatch.setattr(vectors, "SCRATCH", 8000)
    x = torch.randint(-128, 128, (200 * 2**20,), device=gpu, dtype=torch.int8)
    assert same(*(x[i << 20 : (i << 20) + (40 << 20)] for i in range(100)))


@pytest.mark.gpu
def test_a_trace_reads_with_it_on_every_stream(gpu, monkeypatch):
    def never(*given):
        raise AssertionError("read by torch's operations")

    model = torch.nn.Sequential(torch.nn.Linear(512, 700), torch.nn.GELU(), torch.nn.Linear(700, 3)).to(gpu)
    x, side = torch.randn(2000, 512, device=gpu), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    monkeypatch.setattr(digest, "vectors", never)
    with trace(model, rows=True) as recording:
        y = model(x)
        y.sum().backward()
        with torch.cuda.stream(side), torch.no_grad():
            model(x)
    monkeypatch.undo()
    first, second = [e for e in recording.trace.phase("forward") if e.path == "(model)"]
    assert first.outputs[0].digest == second.outputs[0].digest == digest.digest(y)
    assert first.inputs[0].digest == digest.digest(x) and first.inputs[0].row(5) == digest.digest(x[5])
    grads = {e.path: e.outputs[0].digest for e in recording.trace.events if e.kind == "gradient"}
    assert grads == {name: digest.digest(p.grad) for name, p in model.named_parameters()}
