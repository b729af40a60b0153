import pytest
import torch

from samebits.verify.tolerance import Tolerance, judge, tolerance


@pytest.mark.parametrize(
    ("kind", "dtype", "gradient", "expected"),
    [
        ("reduction", torch.bfloat16, False, Tolerance(5e-2, 2e-2)),
        ("reduction", torch.bfloat16, True, Tolerance(1e-1, 2e-2)),
        ("reduction", torch.float32, True, Tolerance(1e-4, 1e-4)),
        ("elementwise", torch.bfloat16, True, Tolerance(2e-2, 1.6e-2)),
        ("elementwise", torch.float32, False, Tolerance(1e-5, 1e-5)),
    ],
)
def test_published_values(kind, dtype, gradient, expected):
    assert tolerance(kind, dtype, gradient) == expected


def test_long_fp32_sums_may_err_more():
    assert tolerance("reduction", torch.float32, True, 4096) == Tolerance(8e-4, 1e-4)
    assert tolerance("reduction", torch.bfloat16, True, 4096) == Tolerance(1e-1, 2e-2)
    assert tolerance("elementwise", torch.float32, True, 4096) == Tolerance(1e-5, 1e-5)


def test_judging():
    golden = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]])
    limit = Tolerance(0.0, 0.1)
    assert judge(golden.clone(), golden, limit) == (0.0, None)
    assert judge(torch.zeros(0, 3), torch.zeros(0, 3), limit) == (0.0, None)
    used, excess = judge(golden + torch.tensor([[0.05, 0.5], [0, 0]]), golden, limit)
    assert used == pytest.approx(2.5)
    assert excess is not None and (excess.row, excess.column, excess.count) == (0, (1,), 1)
    assert "2.5 where the golden has 2, 0.5 away with 0.2 allowed" in str(excess)
    with pytest.raises(ValueError, match="shape"):
        judge(golden[0], golden, limit)


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf"), 3.0])
def test_special_values_must_meet_their_like(wrong):
    for right in (float("inf"), float("nan")) if wrong != wrong or wrong == 3.0 else (float("inf"), 3.0):
        if right == right or wrong == wrong:
            assert judge(torch.tensor([wrong]), torch.tensor([right]), Tolerance(1.0, 1.0))[1] is not None
    assert judge(torch.tensor([wrong]), torch.tensor([1.0]), Tolerance(1e-3, 0.0))[1] is not None
