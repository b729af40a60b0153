"""Process-wide modes of libraries that a peer is also compared in, each in a process of its own.

A mode is environment variables that a library reads once, switches of torch, or a library's own global mode. Nothing here
imports torch, because the variables must stand before that.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass

_WORKSPACE, _LT_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"
_REDUCED = "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
_TF32 = "torch.backends.cuda.matmul.allow_tf32"


@dataclass(frozen=True)
class Mode:
    """How a process is set before anything is computed in it."""

    name: str
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of the process. Those that other modes set are removed from it."""
    flags: tuple[tuple[str, bool], ...] = ()
    """Switches by their full name, e.g. ``torch.backends.cuda.matmul.allow_tf32``."""
    deterministic: bool = False
    """``torch.use_deterministic_algorithms(True)``."""
    enable: str = ""
    """``module:function`` that turns a library's own mode on. Where the module is missing, so is the mode."""
    cuda: bool = True
    """Says nothing on a CPU, where it would only repeat the default."""

    def apply(self) -> None:
        """Set this process. ValueError where a switch is not one that torch has: a typo would compare the default."""
        import torch

        for path, value in self.flags:
            *parents, last = path.removeprefix("torch.").split(".")
            owner = torch
            for parent in parents:
                owner = getattr(owner, parent)
            if not isinstance(getattr(owner, last, None), bool):
                raise ValueError(f"mode {self.name!r}: {path} is no switch of torch {torch.__version__}")
            setattr(owner, last, value)
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
        if self.enable:
            module, _, function = self.enable.partition(":")
            getattr(importlib.import_module(module), function)()


PINNED = Mode("workspace :16:8", ((_WORKSPACE, ":16:8"), (_LT_WORKSPACE, "1")))
"""Too little workspace for a split of K, in cuBLAS and in cuBLASLt."""
NO_LT_WORKSPACE = Mode("no Lt workspace", ((_LT_WORKSPACE, "0"),))
DETERMINISTIC = Mode("deterministic algorithms", ((_WORKSPACE, ":4096:8"),), deterministic=True)
FULL_PRECISION_REDUCTION = Mode("no reduced-precision reduction", flags=((_REDUCED, False),))
TF32 = Mode("TF32", flags=((_TF32, True),))

VLLM = Mode(
    "vLLM batch-invariant",
    ((_WORKSPACE, ":16:8"), (_LT_WORKSPACE, "1"), ("VLLM_BATCH_INVARIANT", "1")),
    enable="vllm.model_executor.layers.batch_invariant:enable_batch_invariant_mode",
)
_SGLANG = "sglang.srt.batch_invariant_ops.batch_invariant_ops:enable_batch_invariant_mode"
_MEGATRON = "megatron.core.transformer.custom_layers.batch_invariant_kernels:enable_batch_invariant_mode"
_IEEE = (("TRITON_F32_DEFAULT", "ieee"),)
SGLANG = Mode("SGLang batch-invariant", enable=_SGLANG)
SGLANG_IEEE = Mode("SGLang batch-invariant, IEEE", _IEEE, enable=_SGLANG)
MEGATRON = Mode("Megatron batch-invariant", enable=_MEGATRON)
MEGATRON_IEEE = Mode("Megatron batch-invariant, IEEE", _IEEE, enable=_MEGATRON)

_LIBRARIES = (VLLM, SGLANG, SGLANG_IEEE, MEGATRON, MEGATRON_IEEE)
FP32_GEMM = (PINNED, NO_LT_WORKSPACE, DETERMINISTIC, TF32, *_LIBRARIES)
"""For a peer that contains a matrix product of FP32 tensors."""
BF16_GEMM = (PINNED, NO_LT_WORKSPACE, DETERMINISTIC, FULL_PRECISION_REDUCTION, *_LIBRARIES)

VARIABLES = tuple(dict.fromkeys(name for mode in (*FP32_GEMM, *BF16_GEMM) for name, _ in mode.environment))
"""What a process without a mode must not have set, or its default is not the libraries'."""
SWITCHES = tuple(dict.fromkeys(path for mode in (*FP32_GEMM, *BF16_GEMM) for path, _ in mode.flags))


def missing(module: str) -> str | None:
    """The words of Python where the top-level package of a module is not installed, or None. Nothing is imported."""
    package = module.partition(".")[0]
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        return None
    return f"ModuleNotFoundError: No module named {package!r}"
