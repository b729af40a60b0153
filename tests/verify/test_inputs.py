"""The generator is a contract: the same integers, the same bits, everywhere and always."""

import numpy as np
import pytest
import torch

from samebits.exact.bits import digest
from samebits.verify import inputs

DIGESTS = {
    "normal/float32": "94cb8867ae9ca4db",
    "normal/bfloat16": "c53dddc57fe52344",
    "wide/float32": "278a057d3833806e",
    "wide/bfloat16": "1bf13a3df7578c17",
    "cancelling/float32": "6496ef6a5b01113d",
    "cancelling/bfloat16": "2e7a6305ecd7a6ff",
    "subnormal/float32": "367dd0fc4e078246",
    "subnormal/bfloat16": "95eeed5be403f7c5",
    "tiny/float32": "49a533401a6959ba",
    "tiny/bfloat16": "e3ecf222c090d8c6",
    "zero/float32": "3ce0b2e33c27154b",
    "zero/bfloat16": "0e8a2f65b989b26a",
    "minus_zero/float32": "1364f6e6d52aaa7e",
    "minus_zero/bfloat16": "1002df95790e8f40",
    "inf/float32": "db565cedf56cd4ba",
    "inf/bfloat16": "9f047c0ce4864bf3",
    "nan/float32": "c19e72bcbffbb699",
    "nan/bfloat16": "df720949fd115abd",
    "huge/float32": "17fa1694c96c3d55",
    "huge/bfloat16": "42cf605a498b9a41",
    "small_mean/float32": "8b10ab94e78eb176",
    "small_mean/bfloat16": "ce63e87e56b529ec",
}


def test_the_integers_are_philox():
    """Philox4x64-10: the published known-answer vector of key 0 and counter 0. numpy counts up before it draws."""
    generator = np.random.Philox(key=0, counter=2**256 - 1)
    expected = ["0x16554d9eca36314c", "0xdb20fe9d672d0fdc", "0xd7e772cee186176b", "0x7e68b68aec7ba23b"]
    assert [hex(word) for word in generator.random_raw(4).tolist()] == expected


@pytest.mark.parametrize("key", sorted(DIGESTS))
def test_fixed_digests(key):
    pattern, name = key.split("/")
    drawn = inputs.row_tensor("stream", [0, 1, 5, 8], (3, 17), getattr(torch, name), seed=7, pattern=pattern)
    assert digest(drawn)[:16] == DIGESTS[key]


@pytest.mark.parametrize("pattern", inputs.PATTERNS)
def test_a_row_depends_on_its_id_alone(pattern):
    whole = inputs.row_tensor("s", range(9), (5,), torch.float32, pattern=pattern)
    some = inputs.row_tensor("s", [8, 2], (5,), torch.float32, pattern=pattern)
    assert digest(whole[[8, 2]]) == digest(some)


def test_seed_stream_and_row_all_matter():
    drawn = [
        inputs.row_tensor(stream, [row], (8,), torch.float32, seed)
        for stream in ("a", "b")
        for row in (0, 1, 2**40)
        for seed in (0, 1)
    ]
    assert len({digest(t) for t in drawn}) == len(drawn)


def test_samples_are_what_they_say():
    many = inputs.row_tensor("s", range(50), (400,), torch.float32)
    assert abs(float(many.mean())) < 0.02 and abs(float(many.std()) - 1) < 0.02
    assert (many != many.bfloat16().float()).float().mean() > 0.9  # not merely BF16 numbers
    weight = inputs.parameter_tensor("s", (4000,), torch.float32, sample="weight")
    assert abs(float(weight.mean()) - 1) < 0.05 and float(weight.std()) > 0.4
    unit = inputs.parameter_tensor("s", (4000,), torch.float32, sample="unit")
    assert unit.min() >= 0 and unit.max() < 1 and abs(unit.mean() - 0.5) < 0.02
    positive = inputs.parameter_tensor("s", (4000,), torch.float32, sample="positive")
    assert float(positive.min()) >= 0.0625 and float(positive.max()) < 1.0625
    with pytest.raises(ValueError, match="no sample named"):
        inputs.draw("nonsense", np.zeros(1, dtype=np.uint64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_patterns_are_what_they_say(dtype):
    def even(pattern):
        return inputs.row_tensor("s", [0, 2, 4], (64,), dtype, pattern=pattern)

    tiny = torch.finfo(dtype).tiny
    assert ((even("subnormal").abs() < tiny) & (even("subnormal") != 0)).any()
    assert (even("subnormal").abs() < tiny).float().mean() > 0.9
    if dtype != torch.float16:  # whose products, in FP32, are never subnormal
        products = even("tiny")[:, :, None].double() * even("tiny")[:, None].double()
        small = products.abs() < torch.finfo(torch.float32).tiny
        assert small.float().mean() > 0.99 and (products.float() != 0).float().mean() > 0.99
        assert (products.float().double() != products).float().mean() > 0.2
        alternating = inputs.row_tensor("s", [0], (64,), dtype, pattern="tiny", tiny=(0, -124))[0]
        assert digest(alternating[::2]) == digest(inputs.row_tensor("s", [0], (64,), dtype)[0, ::2])
        assert (alternating[1::2].abs() < 2.0**-120).all()
    assert not even("zero").any()
    negative_zero = (even("minus_zero") == 0) & even("minus_zero").signbit()
    assert negative_zero.any(1).all() and not negative_zero.all()
    assert even("nan").isnan().sum(1).tolist() == [1, 1, 1]
    assert even("inf").isinf().sum(1).tolist() == [1, 1, 1]
    assert (even("huge").abs() > torch.finfo(dtype).max / 4).all() and even("huge").isfinite().all()
    assert even("wide").isfinite().all()
    assert even("wide").abs().log2().std() > 2
    assert even("small_mean").float().square().mean() < 1e-3
    sums = even("cancelling").double()
    assert (sums.sum(1).abs() < 0.2 * sums.abs().sum(1)).all()
    odd = [inputs.row_tensor("s", [1, 3], (64,), dtype, pattern=p) for p in ("normal", "nan")]
    assert digest(odd[0]) == digest(odd[1])
    with pytest.raises(ValueError, match="no pattern named"):
        even("nonsense")
