"""Packed layouts by our own rules. That they are the pipeline's is tested where diffusers is loaded (``_peer``)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from samebits.models.minimax_h3 import layouts

PINNED = {
    "mini": (
        23,
        "069b8a96d21735a3fd55113e752f7c7e547e5e485384f65530043c36ee783689",
        "b1596d70b0b40a44d9ad1ee29a0ecab6370b3f1e7b3601a4e588ae32aa3cd09d",
        "006d590e4bf5985ce65c62cbc0fff649660d3a8d61016d454209ccb212f81f29",
    ),
    "tiny": (
        264,
        "2d937f3d37bfba96edbf2df9897a2717ca8661290e9723c49de48e74c92aaaef",
        "48784ae38c8c35ee1134c05f16ae46b767f35ef09acefaca08d88efcdc6632c0",
        "1887530114ad420031619db81dc9091749ebc19eb6eb76feba44e6a9a6489333",
    ),
    "small": (
        925,
        "f6b6bd3787dbbe35e69f465261b60a19faa1a28aa91f8a03f8ed8d9a446417cd",
        "a4990b524091dcb76392a89ccac5da149daa2f07461a2d8ad9aaa16a9ea1d139",
        "12289e829fc79cf638f5e3af8d68e85f2207e4bbc6a01de26f2e51bbfa97e041",
    ),
    "medium": (
        3160,
        "c9fe7d3add6e127f80eb146fa08b3cb4f4f43f2681ce65f5f0d1367139182b35",
        "17a752912419e9c827c7752a5900e1250504efb178ebae87e66b04f3dd3a6039",
        "05a9603bd20fce4be775e10679ac38bdefbd14c251d709e104e58b9f5c9bc4dd",
    ),
}
"""S and the SHA-256 of position_ids (float64), token_tags and timestep_indices (int64), made with diffusers 0.42.1."""


def sha256(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", PINNED)
def test_named_layouts_have_the_pinned_bytes(name):
    packed, timesteps, indices = layouts.named(name)
    assert (packed.position_ids.dtype, packed.token_tags.dtype, indices.dtype) == (
        torch.float64,
        torch.int64,
        torch.int64,
    )
    assert (len(packed), *map(sha256, (packed.position_ids, packed.token_tags, indices))) == PINNED[name]
    assert timesteps.tolist() == pytest.approx([0.25, 0.5, 0.999])


def test_every_named_layout_is_pinned():
    assert set(layouts.NAMED) == set(PINNED)


def test_rows_are_partitioned_and_tagged():
    packed = layouts.pack([1, 0, 1], 2, 4, 4, 3, ("first",))
    rows = torch.cat([packed.text_indices, packed.video_indices, packed.audio_indices])
    assert rows.sort().values.tolist() == list(range(len(packed)))
    assert packed.token_tags.tolist() == [1, 0, 1] + [0] * 4 + [2] * 6 + [0] * 8
    assert packed.condition_video_rows == 4 and packed.condition_audio_rows == 0


def test_pairwise_sum_is_numpys():
    for count in (0, 1, 7, 8, 9, 16, 127, 128, 129, 137, 255, 256, 257, 400):
        terms = layouts._spans(count)
        assert layouts.pairwise_sum(terms) == float(np.array(terms).sum())


def test_pairwise_and_sequential_sums_differ():
    """The two anchors of the pipeline are not the same number, so neither order may be taken for the other."""
    terms = layouts._spans(16)
    assert layouts.pairwise_sum(terms) != layouts._chain(terms)


def test_row_timesteps_are_sorted_and_distinct():
    packed = layouts.pack([1], 1, 2, 2, 1, ("first",))
    values, indices = layouts.row_timesteps(packed, 0.75, 0.25, condition_video=0.999)
    assert values.dtype == torch.float32
    assert values[indices].tolist() == pytest.approx([0.75, 0.999, 0.25, 0.25, 0.75])
    same, indices = layouts.row_timesteps(packed, 0.5, 0.5, condition_video=0.5)
    assert len(same) == 1 and not indices.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layouts.pack([1], 1, 2, 2, 1, ("middle",)), "'middle': expected 'first' or 'last'"),
        (lambda: layouts.pack([1], 0, 2, 2, 1), "0 latent frames"),
        (lambda: layouts.pack([1], 1, 1, 2, 1), "1 x 2 has no patch"),
        (lambda: layouts.named("large"), "no layout named 'large'"),
        (lambda: layouts.timesteps(0, 0), "0 timesteps"),
        (lambda: layouts.interleaved(0, 1, 0), "0 rows"),
        (lambda: layouts.block(3, 4, 0), "3 rows cannot have a run"),
        (
            lambda: layouts.pack_references([1], [layouts.Reference("text")], 1, 2, 2, 1),
            "kind 'text': expected",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_synthetic_timesteps():
    assert layouts.timesteps(1, 3).tolist() == [0.0]
    values = layouts.timesteps(4, 3)
    assert values[0] == 0 and values[-1] == 1 and ((values >= 0) & (values <= 1)).all()
    assert torch.equal(values, layouts.timesteps(4, 3)) and not torch.equal(values, layouts.timesteps(4, 4))


def test_interleaved_layout():
    indices, tags = layouts.interleaved(200, 4, 7)
    assert tags[:3].tolist() == [0, 1, 2]
    assert set(indices.tolist()) == set(range(4)) and set(tags.tolist()) == {0, 1, 2}
    assert layouts.interleaved(2, 1, 0)[1].tolist() == [0, 1]


@pytest.mark.parametrize(("seq_len", "count"), [(4, 4), (1000, 3), (40, 1)])
def test_block_layout(seq_len, count):
    indices, tags = layouts.block(seq_len, count, 5)
    assert indices.tolist() == sorted(indices.tolist()) and set(indices.tolist()) == set(range(count))
    for run in range(count):
        inside = tags[indices == run].tolist()
        text, audio = len(inside) // 20, 3 * len(inside) // 20
        assert inside == [1] * text + [0] * (len(inside) - text - audio) + [2] * audio
