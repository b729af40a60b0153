import pytest
import torch

from samebits.exact.bits import bits
from samebits.exact.rounding import to_bfloat16, to_float16


def words(low: list[int]) -> torch.Tensor:
    """Every upper half with the lower halves where rounding can turn."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    word = (high[:, None] | torch.tensor(low)).flatten()
    return ((word + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("ours", "dtype", "low"),
    [
        (to_bfloat16, torch.bfloat16, [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]),
        (to_float16, torch.float16, [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x8000, 0xF000, 0xFFFF]),
    ],
)
def test_casts_round_as_written(ours, dtype, low):
    values = words(low)
    numbers = values[~values.isnan()]
    assert torch.equal(bits(ours(numbers)), bits(numbers.to(dtype)))
    assert ours(values[values.isnan()]).isnan().all()


def test_ties_go_to_even():
    one = torch.tensor([0x3F808000, 0x3F818000, 0x7F7F8000], dtype=torch.int32).view(torch.float32)
    assert [hex(b) for b in bits(to_bfloat16(one)).tolist()] == ["0x3f80", "0x3f82", "0x7f80"]
