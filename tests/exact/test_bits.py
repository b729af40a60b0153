import hashlib

import pytest
import torch

from samebits.exact.bits import bits, canonical_nan, digest, pattern
from samebits.exact.compare import UNORDERED, first_difference, same_bits, ulp_distance


def f32(*words):
    return torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32).view(torch.float32)


def test_digest_is_of_the_little_endian_bytes_in_index_order():
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    raw = bytes.fromhex("0000803f 00000040 00004040 00008040")
    assert digest(value) == hashlib.sha256(raw).hexdigest()
    assert digest(value.t().contiguous().t()) == digest(value)
    assert digest(value.t()) != digest(value)
    assert digest(torch.zeros(0)) == hashlib.sha256(b"").hexdigest()
    assert digest(torch.tensor([True, False])) == hashlib.sha256(b"\x01\x00").hexdigest()


def test_zero_signs_and_nan_payloads_are_bits():
    zeros = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert torch.equal(*zeros) and not same_bits(*zeros)
    difference = first_difference(*zeros)
    assert difference is not None
    assert (difference.left_bits, difference.right_bits) == ("0x00000000", "0x80000000")
    assert (difference.count, difference.max_ulp) == (1, 0)
    quiet, other = f32(0x7FC00000), f32(0x7FC00001)
    assert first_difference(quiet, other) is not None
    assert first_difference(quiet, other, payloads=False) is None
    assert first_difference(quiet, quiet) is None
    assert pattern(canonical_nan(f32(0xFFC12345))) == "0x7fc00000"


def test_first_difference_is_first_in_index_order():
    left = torch.zeros(3, 4, 5, dtype=torch.bfloat16)
    right = left.clone()
    right[1, 2, 3] = 1.0
    right[2, 0, 0] = float("nan")
    difference = first_difference(left, right)
    assert difference is not None
    assert (difference.row, difference.column) == (1, (2, 3))
    assert (difference.right_bits, difference.count, difference.total, difference.max_ulp) == ("0x3f80", 2, 60, None)
    assert "row 1, column 2, 3: 0x0000 (0) against 0x3f80 (1); 2 of 60" in str(difference)


def test_first_difference_of_a_scalar_and_of_strided_views():
    difference = first_difference(torch.tensor(1.0), torch.tensor(2.0))
    assert difference is not None and difference.column == ()
    wide = torch.arange(12.0).view(3, 4)
    assert first_difference(wide[:, ::2], wide[:, ::2].clone()) is None


@pytest.mark.parametrize("other", [torch.zeros(2), torch.zeros(3, dtype=torch.float16)])
def test_unlike_tensors_are_refused(other):
    with pytest.raises(ValueError, match="cannot compare"):
        first_difference(torch.zeros(3), other)
    assert not same_bits(torch.zeros(3), other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ulp_distance(dtype):
    one = torch.tensor([1.0, -1.0, 0.0, -0.0], dtype=dtype)
    word = bits(one)
    up = (word + torch.tensor([1, -1, 1, 0], dtype=word.dtype)).view(dtype)
    assert ulp_distance(one, up).tolist() == [1, 1, 1, 0]
    tiny = torch.tensor([-1.0], dtype=dtype), torch.tensor([1.0], dtype=dtype)
    assert ulp_distance(*tiny).item() > 0
    nan = torch.tensor([float("nan")], dtype=dtype)
    assert ulp_distance(nan, nan).item() == 0
    assert ulp_distance(nan, tiny[1]).item() == UNORDERED
    assert ulp_distance(torch.tensor([-0.0], dtype=dtype), torch.tensor([0.0], dtype=dtype)).item() == 0
