"""The digest against its definition in plain Python integers, over dtypes, layouts, lengths and modes."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from samebits.verify.trace import digest as under_test
from samebits.verify.trace.digest import CHUNK, COLUMNS, LAST, digest, key_bytes, sums, text, vectors


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def by_definition(data: bytes, last: int = LAST) -> str:
    """Nothing but Python integers and the text of the module's docstring."""
    size, level = len(data), 1
    while True:
        keys = [signed(byte) for byte in key_bytes(f"chunk{level}", COLUMNS * CHUNK)]
        vectors = []
        for start in range(0, len(data), CHUNK):
            chunk = [signed(byte) for byte in data[start : start + CHUNK]]
            vectors.append([sum(b * keys[c * CHUNK + i] for i, b in enumerate(chunk)) for c in range(COLUMNS)])
        if len(vectors) <= last:
            break
        data, level = b"".join(struct.pack(f"<{COLUMNS}i", *vector) for vector in vectors), level + 1
    raw = key_bytes("last", LAST * COLUMNS * 2 * 8)
    words = struct.unpack(f"<{LAST * COLUMNS * 2}q", raw)
    found = ""
    for lane in range(2):
        total = size * (int.from_bytes(key_bytes(f"length{lane}", 8), "little") | 1)
        for j, vector in enumerate(vectors):
            total += sum(value * words[(j * COLUMNS + c) * 2 + lane] for c, value in enumerate(vector))
        found += f"{total % 2**64:016x}"
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def some_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(count)), dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 1023, 1024, 1025, 2048, 20 * 1024 + 5, 64 * 1024 + 1])
def test_every_length_follows_the_definition(size):
    tensor = some_bytes(size)
    assert digest(tensor) == by_definition(raw(tensor))


def test_upper_levels_follow_the_definition(monkeypatch):
    tensor = some_bytes(257 * 1024 + 3)  # 258 chunks, then 17
    assert digest(tensor) == by_definition(raw(tensor))
    monkeypatch.setattr(under_test, "LAST", 2)
    tensor = some_bytes(70 * 1024 + 3)  # 71 chunks, then 5, then 1; the last keys are made already
    assert digest(tensor) == by_definition(raw(tensor), last=2)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(
            torch.complex64,
            torch.complex128,
            torch.bool,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.uint8,
        ),
        *(torch.uint16, torch.uint32, torch.uint64),
    ],
)
def test_every_dtype(dtype):
    width = torch.empty((), dtype=dtype).element_size()
    values = some_bytes(3 * 37 * width, 1)
    tensor = (values & 1).view(torch.bool) if dtype is torch.bool else values.view(dtype)
    assert digest(tensor.view(3, 37)) == by_definition(raw(tensor))
    assert digest(tensor[5]) == by_definition(raw(tensor[5]))  # 0-d, and misaligned


def test_layouts_count_by_index_order():
    x = torch.randn(6, 10, 14)
    for view in (
        x[:, ::2],
        x.transpose(0, 2),
        x[1:, 3:, 5:],
        x[:1].expand(6, 10, 14),
        x.permute(2, 0, 1)[::3],
        x[..., :1],
    ):
        assert digest(view) == by_definition(raw(view))
    conjugated = torch.randn(9, dtype=torch.complex64).conj()
    assert digest(conjugated) == by_definition(raw(conjugated.resolve_conj()))
    assert digest(conjugated.imag) == by_definition(raw(conjugated.imag.resolve_neg()))


def test_empty_and_scalar():
    assert digest(torch.empty(0, 5)) == by_definition(b"") == "0" * 32
    assert digest(torch.tensor(1.5)) == by_definition(struct.pack("<f", 1.5))


def test_small_changes_are_seen():
    x = torch.randn(40, 513)
    seen = {digest(x)}
    for index in ((0, 0), (17, 256), (39, 512)):
        for bit in (0, 13, 31):
            y = x.clone()
            y.view(torch.int32)[index] ^= torch.tensor(1 << bit).to(torch.int32)
            seen.add(digest(y))
    swapped = x.clone()
    swapped[3, 5], swapped[3, 6] = x[3, 6], x[3, 5]
    rows = x.clone()
    rows[[0, 1]] = x[[1, 0]]
    seen |= {digest(swapped), digest(rows), digest(x.flatten()[:-1])}
    # Sign bits of many elements at once: sums modulo a power of two are blind to an even number of top bits.
    for count in range(2, 9):
        y = torch.zeros(16, dtype=torch.float64)
        y[:count] = -0.0
        seen.add(digest(y))
    assert len(seen) == 1 + 9 + 3 + 7


def test_zeros_nans_and_lengths_are_told_apart():
    plus, minus = torch.zeros(8), -torch.zeros(8)
    quiet, payload = torch.tensor([0x7FC00000]).int(), torch.tensor([0x7FC00001]).int()
    assert digest(plus) != digest(minus)
    assert digest(quiet.view(torch.float32)) != digest(payload.view(torch.float32))
    assert len({digest(torch.zeros(n, dtype=torch.uint8)) for n in (0, 1, 2, 1023, 1024, 1025, 2048)}) == 7


@pytest.mark.parametrize(
    ("shape", "lead"), [((5, 7), 1), ((5, 256), 1), ((2, 3, 300), 2), ((3, 512), 1), ((4, 3, 2), 1), ((6,), 1)]
)
def test_rows_are_the_digests_of_the_rows(shape, lead):
    x = torch.randn(shape)
    whole, rows, width = vectors(x, lead)
    expected = [digest(row) for row in x.flatten(0, lead - 1)]
    assert text(sums(rows), width) == "".join(expected)
    assert text(sums(whole), x.numel() * 4) == digest(x)


def test_rows_of_nothing():
    for shape in ((0, 4), (3, 0)):
        whole, rows, width = vectors(torch.empty(shape), 1)
        assert rows.shape == (shape[0], 0, COLUMNS) and width == 0
        assert text(sums(whole), 0) == "0" * 32


def test_both_products_agree(monkeypatch):
    x = some_bytes(64 * 1024, 3)
    x[:2048] = 128
    first = digest(x)
    monkeypatch.setattr(under_test, "integer_product_is_exact", lambda device: False)
    assert digest(x) == first == by_definition(raw(x))


def test_a_saturating_product_is_refused(monkeypatch):
    """What a CPU without exact 8-bit instructions returns: pairs added in 16 bits."""
    exact = torch._int_mm

    def saturating(a, b):
        pairs = ((a.int() + 128).unsqueeze(-1) * b.int()).unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1).sum(1)
        return (pairs - 128 * b.int().sum(0)).to(torch.int32)

    under_test.integer_product_is_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not under_test.integer_product_is_exact(torch.device("cpu"))
    under_test.integer_product_is_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", exact)


def test_modes_of_the_caller_do_not_matter():
    x = torch.randn(3, 700)
    expected = by_definition(raw(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert digest(x) == expected
    with torch.inference_mode():
        assert digest(x) == expected
        assert digest(x * 1) == expected
    with torch.device("meta"):
        assert digest(x) == expected
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert digest(x) == expected
    finally:
        torch.set_float32_matmul_precision(before)
    assert digest(x.requires_grad_()) == expected


def test_what_has_no_bytes_is_said():
    for tensor, word in (
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(3, device="meta"), "no data"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "jagged"),
    ):
        with pytest.raises(ValueError, match=word):
            digest(tensor)


@pytest.mark.gpu
def test_the_gpu_gives_the_digest_of_the_cpu():
    for size in (1, 1024, 20 * 1024 + 5, 5 * 2**20 + 1):
        tensor = some_bytes(size)
        assert digest(tensor.cuda()) == digest(tensor)
    x = torch.randn(600, 3000, dtype=torch.bfloat16)
    for view in (x, x[:, 1:], x.t(), x[::7, :5]):
        assert digest(view.cuda()) == digest(view)
    assert under_test.integer_product_is_exact(torch.device("cuda", torch.cuda.current_device()))
