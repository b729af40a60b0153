"""G9: whatever changes code or plan is in the key of its cache, so no two configurations can share an entry."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits import dispatch, registry
from samebits.checks import DTYPES, dtype_name
from samebits.runtime import cubin_cache, nvrtc
from samebits.runtime.nvrtc import Built, CudaKernel


def kernels(name: str) -> list[CudaKernel]:
    return [build.kernel for build in registry.operator(name).backend("cuda").builds()]


def test_no_two_kernels_share_a_key() -> None:
    made = {(k, arch) for n in registry.names() for k in kernels(n) for arch in ("sm_80", "sm_90a", "sm_100")}
    assert len({cubin_cache.key(kernel, arch) for kernel, arch in made}) == len(made)


def test_everything_that_changes_the_code_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = CudaKernel("h_aggregate", "forward", (("VEC", 8),))
    keys = [cubin_cache.key(kernel, "sm_90a")]
    keys.append(cubin_cache.key(dataclasses.replace(kernel, defines=(("VEC", 1),)), "sm_90a"))
    keys.append(cubin_cache.key(dataclasses.replace(kernel, defines=(("VEC", 8), ("MORE", 0))), "sm_90a"))
    release, headers, text = nvrtc.release, nvrtc.headers, nvrtc.source_text
    monkeypatch.setattr(nvrtc, "release", lambda: release() + "1")
    keys.append(cubin_cache.key(kernel, "sm_90a"))
    monkeypatch.setattr(nvrtc, "release", release)
    monkeypatch.setattr(nvrtc, "headers", lambda op: headers(op) | {"fold.cuh": headers(op)["fold.cuh"] + " "})
    keys.append(cubin_cache.key(kernel, "sm_90a"))
    monkeypatch.setattr(nvrtc, "headers", headers)
    monkeypatch.setattr(nvrtc, "source_text", lambda kernel: text(kernel) + " ")
    keys.append(cubin_cache.key(kernel, "sm_90a"))
    monkeypatch.setattr(nvrtc, "source_text", text)
    monkeypatch.setattr(nvrtc, "OPTIONS", nvrtc.OPTIONS[:-1])
    keys.append(cubin_cache.key(kernel, "sm_90a"))
    assert len(set(keys)) == len(keys)


def test_a_damaged_entry_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel, made = CudaKernel("h_aggregate", "forward", (("VEC", 8),)), []

    def compile_kernel(kernel: CudaKernel, arch: str) -> Built:
        made.append(kernel)
        return Built(b"code", "")

    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    assert [cubin_cache.cubin(kernel, "sm_90a") for _ in range(2)] == [b"code"] * 2 and len(made) == 1
    (file,) = tmp_path.glob("*.cubin")
    file.write_bytes(file.read_bytes()[:-1])
    assert cubin_cache.cubin(kernel, "sm_90a") == b"code" and len(made) == 2


@pytest.mark.parametrize("name", registry.names())
def test_no_two_calls_share_a_decision(name: str) -> None:
    """What is decided once per metadata is decided from all of it: contract, dtypes, sizes, strides, alignment, results."""
    from samebits.verify.operators import derived, draw

    op, spec = registry.operator(name), registry.spec(name)
    decided: dict[str, Any] = {}

    def changed(tensors: list[Any], index: int, value: Any) -> list[Any]:
        return [value if i == index else t for i, t in enumerate(tensors)]

    def decide(label: str, tensors: list[Any], contract: str, **options: Any) -> None:
        scalars = [s.default for s in spec.scalars]
        decided[label] = op.prepare(True, tensors, scalars, contract, "reference", **options).call

    for contract in spec.contracts:
        for width, rows in itertools.product((16, 24) if spec.size_limits else (16,), (2, 3)):
            sizes = spec.complete({axis: width for axis, _, _ in spec.size_limits})
            inputs = spec.backward.inputs
            kinds = {a.name: DTYPES[contract.accepted(a)[0]] for a in inputs}
            known = {a.name: draw(spec, a, range(rows), sizes, 0, kinds[a.name]) for a in inputs if not a.derived}
            known |= derived(spec, spec.backward, known, sizes)
            tensors = [known[a.name] for a in inputs]
            label = f"{contract.name} {width} {rows}"
            decide(label, tensors, contract.name)
            for dtype in spec.gradient_dtypes_of({name: dtype_name(kind) for name, kind in kinds.items()})[1:]:
                decide(f"{label} gradients {dtype}", tensors, contract.name, grad_dtype=dtype)
            count = len(spec.backward.results)
            for index in range(count if count > 1 else 0):
                mask = [i == index for i in range(count)]
                decide(f"{label} {mask}", tensors, contract.name, mask=mask)
            for index, arg in enumerate(inputs):
                one = tensors[index]
                if arg.optional:
                    decide(f"{label} no {arg.name}", changed(tensors, index, None), contract.name)
                if arg.axes:
                    shifted = torch.cat([one.flatten()[:1], one.flatten()])[1:].view(one.shape)
                    decide(f"{label} shifted {arg.name}", changed(tensors, index, shifted), contract.name)
                if arg.axes and arg.rows:
                    wide = torch.cat([one, one], dim=-1)[..., : one.shape[-1]]
                    decide(f"{label} pitch {arg.name}", changed(tensors, index, wide), contract.name)
                kin = spec.backward.kin(arg.name)
                for dtype in contract.accepted(arg)[1:] if arg.name == kin[0] else ():
                    cast = [t.to(DTYPES[dtype]) if a.name in kin else t for a, t in zip(inputs, tensors, strict=True)]
                    decide(f"{label} {arg.name} {dtype}", cast, contract.name)
    assert len(set(decided.values())) == len(decided)


def tensors_of(name: str) -> list[torch.Tensor]:
    from samebits.verify.operators import draw

    spec = registry.spec(name)
    sizes = dict(spec.fixed_sizes) | {axis: 16 for axis, _, _ in spec.size_limits}
    return [draw(spec, arg, range(2), sizes, 0) for arg in spec.forward.inputs]


def test_a_forced_plan_is_a_decision_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.operator("h_aggregate")
    monkeypatch.setattr(op.backend("reference"), "plans", lambda call: ("first", "second"))
    monkeypatch.setattr(op, "_decisions", {})
    chosen = []
    for index in (0, 1, 0):
        with dispatch.force_plan(index):
            ready = op.prepare(False, tensors_of("h_aggregate"), [], "ascending", "reference")
        chosen.append(ready.choice.plan)
    assert chosen == ["first", "second", "first"]
