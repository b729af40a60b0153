"""Prints the digests of the published cases as JSON, by an oracle whose square root is named: ``torch`` or ``ieee``.

Run as a process of its own, because torch and MKL read their settings (``ATEN_CPU_CAPABILITY``, ``MKL_CBWR``) once.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from torch import Tensor

from samebits.accept import ReferenceProvider
from samebits.accept.cases import CASES


class SquareRoot(ReferenceProvider):
    """The oracle with its controller RMS spelled out, so that the square root can be chosen."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def fp32_gemm_rms_fwd(self, x_flat: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        p = self.fixed_k_gemm_fwd(x_flat, weight)
        squares = torch.zeros(len(x_flat))
        for k in range(x_flat.shape[1]):
            squares = squares + x_flat[:, k] * x_flat[:, k]
        # A double root of an FP32 number is too far from the middle of two FP32 numbers for its own error to matter.
        root = torch.sqrt(squares) if self.kind == "torch" else torch.sqrt(squares.double()).float()
        q = root / math.sqrt(x_flat.shape[1])
        r = 1 / (q + eps)
        return p, r, (r, q)


def main() -> None:
    provider = ReferenceProvider() if sys.argv[1] == "reference" else SquareRoot(sys.argv[1])
    found = {}
    for case in CASES:
        if case.family != "integer":
            trace = case.workload(torch.device("cpu")).run(provider)
            found[case.name] = trace.digests() | {"names": list(trace.names())}
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 1000
    wrong = int((torch.sqrt(values) != torch.sqrt(values.double()).float()).sum())
    about = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "roots_wrong": wrong,
    }
    print(json.dumps({"about": about, "cases": found}))


if __name__ == "__main__":
    main()
