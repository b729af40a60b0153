"""The GPU's kernel of the digest: its bits on a CPU, by emulation, its machine code, and its bits on a GPU."""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch
from drift.models import Net

from samebits.audit import compile as audit
from samebits.audit.build import Build
from samebits.audit.judge import judge
from samebits.audit.limits import Limits
from samebits.emulate.launch import Emulator, KernelFault
from samebits.runtime import nvrtc
from samebits.verify.trace import digest, pending, trace, tree


@pytest.fixture
def emulated(monkeypatch):
    """The kernel on the CPU. The emulator can be told to run another source or another order of threads."""
    emulator, keys = Emulator(), tree.arranged_keys()
    monkeypatch.setattr(tree, "launch", emulator.launch)
    monkeypatch.setattr(tree, "_empty", lambda index, count: torch.full((count, 16), -7, dtype=torch.int32))
    monkeypatch.setattr(tree, "_keys", lambda index: keys)
    monkeypatch.setattr(tree, "_current", lambda index: (index, 0))
    monkeypatch.setattr(tree, "SLAB", 512)
    return emulator


@pytest.fixture
def small_last(monkeypatch):
    """One vector is left, so that small tensors take several launches."""
    cached = (tree.passes, tree.of_bytes, tree.of_rows)
    for module in (tree, digest):
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


def values(vectors):
    if vectors is None:
        return None
    end = vectors.first + vectors.many * vectors.each
    return vectors.store[vectors.first : end].view(vectors.many, vectors.each, 16)


def same(tensor, lead=0, axis=0):
    """Whether both ways give the same vectors of the tensor and of its rows."""
    whole, rows, width = tree._vectors(tensor, lead, axis, tree.Slabs(), 0)
    expected, expected_rows, expected_width = digest.vectors(tensor, lead, axis)
    both = ((values(whole), expected), (values(rows), expected_rows))
    return width == expected_width and all(
        (a is None) == (b is None) and (a is None or (a.shape == b.shape and torch.equal(a, b))) for a, b in both
    )


SIZES = (0, 1, 15, 16, 1023, 1024, 1025, 2**14 - 1, 2**14, 2**14 + 1, 2**18 - 1, 2**18, 2**18 + 1)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_alignments(emulated, size):
    x = data(size + 3)
    emulated.descending = size % 2 == 1
    assert same(x[:size]) and same(x[1 : size + 1]) and same(x[2 : size + 2]) and same(x[3:])


def test_three_levels(emulated):
    assert same(data(2**22 + 1025)[1:])


ROWS = (
    *((5, 1024), (300, 1024), (40, 1000), (7, 1344), (3, 20 * 1024 + 5), (3, 257 * 1024 + 16), (2, 256 * 1024 + 5)),
    *((0, 4), (4, 0), (6,), (7, 3, 100), (2, 3, 2048)),
)


@pytest.mark.parametrize("shape", ROWS)
def test_rows(emulated, shape):
    x = data(*shape)
    assert same(x, 1)
    if len(shape) == 3:
        assert same(x, 2) and same(x, 1, 1)
    if shape[1:] == (3, 100):
        assert same(x, 1, 2) and same(x, 2, 1)


def test_layouts(emulated):
    x = data(40, 3, 2048)
    apart = x[:, 1, :1024]
    for view in (apart, x[..., :1024], x[:, 1], x[:1, 0, :1024].expand(30, 1024), x[:, :1].transpose(0, 1)):
        assert tree.of_bytes(view.shape, view.stride(), 1) is not None, "read where it lies"
        assert same(view) and same(view, 1)
    for view in (x[:, 1, :1000], x[::3, :, :1024], x.transpose(0, 1), x[..., ::2], x[0].t()):
        assert tree.of_bytes(view.shape, view.stride(), 1) is None, "copied"
        assert same(view) and same(view, 1)
    z = torch.randn(9, 700, dtype=torch.complex64).conj()
    assert same(z) and same(z.imag, 1)


def test_several_launches(emulated, small_last):
    x = data(300 * 1024 + 5)
    assert len(tree.of_bytes(x.shape, x.stride(), 1)) == 2
    assert same(x) and same(data(2, 290 * 1024)[:, 1:], 1) and same(data(30, 1024), 1)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("part[2][4] = {}", "part[2][4] = {1}"),
        ("for (int w = 0; w < warps", "for (int w = 1; w < warps"),
        ("tile + TILE <= width / CHUNK", "tile <= width / CHUNK"),
        ("__syncthreads();\n\n    const bool last", "\n\n    const bool last"),
        ("above[i] = found", "above[i ^ 1] = found"),
        ("left > 4 * i + j", "left >= 4 * i + j"),
        ("__syncthreads();\n\n  int sum", "\n\n  int sum"),
    ],
)
def test_a_fault_is_found(emulated, small_last, right, wrong):
    source = nvrtc.source_text(tree.KERNEL)
    assert source.count(right) == 1
    emulated.sources[tree.KERNEL] = source.replace(right, wrong)
    found = []
    for emulated.descending in (False, True):
        for tensor in (data(1025), data(5003)[:5001], data(2**18 + 1)):
            try:
                found.append(same(tensor))
            except KernelFault:
                found.append(False)
            if not found[-1]:
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
    with pytest.raises(RuntimeError, match="at most 65535 rows"):
        tree.of_rows((70000, 2**19), (2**19, 1), 1, 1)
    assert len(tree.of_bytes((2**38,), (1,), 1)) == 2
    with pytest.raises(RuntimeError, match="more bytes than"):
        tree.of_bytes((2**38 + 1,), (1,), 1)


def test_a_trace_has_the_same_digests(emulated, monkeypatch):
    model, x, slabs = Net(32, 2), torch.randn(40, 32), tree.Slabs()

    def run():
        with trace(model, rows=True) as recording:
            model(x.clone().requires_grad_()).sum().backward()
            model.zero_grad()
        return [event.to_json() for event in recording.trace.events]

    expected = run()
    monkeypatch.setattr(pending, "_by_torch", lambda t, lead, axis: tree._vectors(t, lead, axis, slabs, 0))
    assert run() == expected and len(slabs._open) == 1


def test_memory_that_was_given_back_is_not_read(emulated):
    x = data(3000)
    view = x[5:]
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="given back"):
        tree._vectors(view, 0, 0, tree.Slabs(), 0)


# --- whether a device can -----------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """A CUDA device as far as :func:`tree.usable` looks."""
    monkeypatch.setattr(tree.machine, "missing", lambda backend: None)
    monkeypatch.setattr(tree.machine, "info", lambda device: tree.machine.H200)
    tree.usable.cache_clear()
    yield torch.device("cuda", 0)
    tree.usable.cache_clear()


def test_a_device_that_gives_other_sums_is_not_used(emulated, small_last, device, monkeypatch):
    monkeypatch.setattr(tree.torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(tree, "vectors", lambda t, lead, axis, slabs: tree._vectors(t, lead, axis, slabs, 0))
    cpu = torch.device("cpu")
    assert tree._difference(cpu) is None
    source = nvrtc.source_text(tree.KERNEL)
    emulated.sources[tree.KERNEL] = source.replace("part[2][4] = {}", "part[2][4] = {1}")
    why = tree._difference(cpu)
    assert "other sums for" in why
    monkeypatch.setattr(tree, "_difference", lambda device: why)
    with pytest.warns(UserWarning, match="by torch: the kernel gives other sums"):
        assert not tree.usable(device)


def test_a_device_that_cannot_is_told_once(device, monkeypatch):
    def fails(device):
        raise nvrtc.CompileError("no such\narchitecture")

    monkeypatch.setattr(tree, "_difference", fails)
    with pytest.warns(UserWarning, match="cuda:0 are made slowly, by torch: CompileError: no such architecture"):
        assert not tree.usable(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not tree.usable(device) and not tree.usable(torch.device("cpu"))


# --- on a GPU -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    tree.usable.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back unseen
        assert tree.usable(device)
    return device


def on_gpu(tensor, lead=0, axis=0):
    found = tree.vectors(tensor, lead, axis, tree.Slabs())
    expected = digest.vectors(tensor, lead, axis)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert (ours is None) == (theirs is None) and (ours is None or torch.equal(values(ours).cpu(), theirs.cpu()))
    assert found[2] == expected[2]


@pytest.mark.gpu
def test_the_kernel_has_the_bits_of_torch(gpu):
    x = torch.randint(-128, 128, (70 * 2**20 + 7,), device=gpu, dtype=torch.int8)
    for size in (*SIZES, 5 * 2**20 + 3, 2**22, 2**22 + 1, 2**26, 2**26 + 1, 70 * 2**20 + 3):
        for begin in (0, 1, 2, 3, 4):
            on_gpu(x[begin : begin + size])
    for shape in ROWS:
        rows = x[: math.prod(shape)].view(shape)
        on_gpu(rows, 1)
        on_gpu(rows, len(shape) - 1, 1 if len(shape) == 2 else 0)
    y = x[: 600 * 3000 * 2].view(torch.bfloat16).view(600, 3000)
    for view in (y, y[:, 1:], y.t(), y[::7, :5], y[:, :1024], y[:, 512:1536], y[1:], y[3, 5:]):
        on_gpu(view)
        on_gpu(view, min(1, view.dim() - 1))
    for dtype in (torch.float64, torch.float32, torch.float16, torch.float8_e4m3fn, torch.int64, torch.complex64):
        on_gpu(x[: 2**14].view(dtype)[3:], 1)
    on_gpu((x[:4099] & 1).bool())
    on_gpu(torch.randn(9, 700, dtype=torch.complex64, device=gpu).conj())


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
