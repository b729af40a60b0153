"""The compiled tensor-core chain against its definition, on everything that could tell them apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from exact.test_tensor_core import KINDS, agree, draw  # type: ignore[import-not-found,unused-ignore]

from samebits.exact import compiled, tensor_core
from samebits.exact.compare import same_bits
from samebits.exact.tensor_core import chain, definition
from samebits.runtime import host_compiler

HALVES = (torch.bfloat16, torch.float16)


def test_there_is_a_compiler_here() -> None:
    """Without this, the others would compare the definition with itself."""
    assert compiled.missing() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_bits_are_those_of_the_definition(dtype: torch.dtype, kind: str) -> None:
    a, b, start = draw(kind, seed=11, m=9, n=37, k=272)
    a, b = a.to(dtype), b.to(dtype)
    assert agree(chain(a, b, start), definition(a, b, start)).all()
    assert agree(chain(a, b), definition(a, b)).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_bit_pattern_is_an_operand(dtype: torch.dtype) -> None:
    """All 65536 values, each beside a few others and into a start of any bits: zeros, subnormals, infinities and NaN too."""
    generator = torch.Generator().manual_seed(12)
    every = torch.arange(-(2**15), 2**15).to(torch.int16)[torch.randperm(2**16, generator=generator)]
    a = every.view(dtype).view(-1, 1) * torch.tensor([1.0] + [0.0] * 3).to(dtype).where(
        ~every.view(dtype).isnan()[:, None], 1
    )
    a[:, 1] = every.flip(0).view(dtype)
    b = torch.tensor([[1.0, 0.0, 2.0, 3.0], [-3.0, 1.0, 0.0, 0.0], [2.0**-14, 2.0**-14, 1.0, 0.0]]).to(dtype)
    start = torch.randint(-(2**31), 2**31 - 1, (2**16, 3), generator=generator).to(torch.int32).view(torch.float32)
    assert agree(chain(a, b, start), definition(a, b, start)).all()
    assert agree(chain(a, b), definition(a, b)).all()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (3, 17, 15), (2, 200, 33), (5, 65, 513), (65, 3, 256), (1, 130, 1000)]
)
def test_any_shape(m: int, n: int, k: int) -> None:
    a, b, start = draw("normal", seed=13, m=m, n=n, k=k)
    assert same_bits(chain(a, b, start), definition(a, b, start))


def test_sums_of_more_than_31_bits() -> None:
    """Sixteen products just below 4, with one sign: their sum at 25 fractional bits does not fit an int32."""
    a, b = torch.full((2, 32), 255 / 128).bfloat16(), torch.full((20, 32), 255 / 128).bfloat16()
    a[1], start = -a[1], torch.full((2, 20), 1.999)
    assert same_bits(chain(a, b, start), definition(a, b, start))


def test_operands_are_read_by_their_strides_and_left_alone() -> None:
    a, b, start = draw("wide", seed=14, m=6, n=20, k=64)
    before = [t.clone() for t in (a, b, start)]
    expected = definition(a, b, start)
    assert same_bits(chain(a.T.contiguous().T, b.T.contiguous().T, start.T.contiguous().T), expected)
    assert same_bits(chain(a, b, start[:, :1].expand(6, 20)), definition(a, b, start[:, :1].expand(6, 20)))
    assert all(same_bits(old, new) for old, new in zip(before, (a, b, start), strict=True))


def test_threads_share_the_outputs() -> None:
    a, b, start = draw("normal", seed=15, m=4, n=300, k=96)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert same_bits(chain(a, b, start), definition(a, b, start)), threads
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_the_definition_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a, b, start = draw("normal", seed=16)
    expected = chain(a, b, start)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    compiled._library.cache_clear()
    compiled.missing.cache_clear()
    try:
        monkeypatch.setattr(host_compiler, "COMPILER", "no-such-compiler")
        why = compiled.missing()
        assert why is not None and re.search("no-such-compiler.*not installed", why)
        called = []

        def block(*given: torch.Tensor) -> torch.Tensor:
            called.append(1)
            return definition_block(*given)

        definition_block = tensor_core.block
        monkeypatch.setattr(tensor_core, "block", block)
        assert same_bits(chain(a, b, start), expected) and called
    finally:
        compiled._library.cache_clear()
        compiled.missing.cache_clear()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("FRACTION = 25", "FRACTION = 24"), ("LOWEST = -96", "LOWEST = -400"), ("~(size >> 24)", "~0")],
)
def test_another_model_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str
) -> None:
    source = tmp_path / "tensor_core.cpp"
    text = (Path(compiled.__file__).parent / "tensor_core.cpp").read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        compiled,
        "files",
        lambda package: tmp_path if package == "samebits.exact" else Path(compiled.__file__).parents[1] / "emulate",
    )
    compiled._library.cache_clear()
    try:
        differing = 0
        for kind in KINDS:
            a, b, start = draw(kind, seed=17, m=8, n=16, k=64)
            out = start.clone()
            compiled.chain(a, b, out)
            differing += int((~agree(out, definition(a, b, start))).sum())
        assert differing
    finally:
        compiled._library.cache_clear()
