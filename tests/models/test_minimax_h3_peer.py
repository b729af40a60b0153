"""Our layouts and our eager provider beside the installed diffusers: the same bits."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from samebits import cli
from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import geometry, layouts, peer, provider, record, replay, stages, weights
from samebits.models.minimax_h3.candidate import Candidate


def assert_same(ours, theirs):
    for field in fields(layouts.Packed):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        assert same_bits(one, other) if isinstance(one, torch.Tensor) else one == other, field.name
    for one, other in zip(layouts.row_timesteps(ours, 0.3, 0.3), peer.row_timesteps(theirs, 0.3, 0.3), strict=True):
        assert same_bits(one, other)
    times = (0.75, 0.1, 0.999, 0.75)
    for one, other in zip(layouts.row_timesteps(ours, *times), peer.row_timesteps(theirs, *times), strict=True):
        assert same_bits(one, other)


def even(rng):
    return 2 * rng.randrange(1, 16)


@pytest.mark.parametrize("anchors", [(), ("first",), ("last",), ("first", "last"), ("last", "first")])
def test_packed_layouts_are_the_pipelines(anchors):
    rng = random.Random(repr(anchors))
    for _ in range(8):
        tags = [rng.choice((0, 1)) for _ in range(rng.randrange(40))]
        sizes = (rng.randrange(1, 60), even(rng), even(rng), rng.randrange(50))
        assert_same(layouts.pack(tags, *sizes, anchors), peer.pack(tags, *sizes, anchors))


@pytest.mark.parametrize("name", layouts.NAMED)
def test_named_layouts_are_the_pipelines(name):
    asked = layouts.NAMED[name]
    sizes = (asked.latent_frames, asked.latent_height, asked.latent_width, asked.audio_latents)
    assert_same(asked.pack(), peer.pack([layouts.TEXT] * asked.text, *sizes, asked.anchors))


def reference(rng):
    kind = rng.choice(("image", "video", "audio"))
    heard = 0 if kind == "image" else rng.randrange(kind == "audio", 40)
    return layouts.Reference(kind, rng.randrange(1, 60), even(rng), even(rng), heard)


def test_layouts_with_references_are_the_pipelines():
    rng = random.Random(0)
    for _ in range(25):
        tags = [rng.choice((0, 1)) for _ in range(rng.randrange(40))]
        sizes = (rng.randrange(1, 60), even(rng), even(rng), rng.randrange(50))
        references = [reference(rng) for _ in range(rng.randrange(5))]
        assert_same(layouts.pack_references(tags, references, *sizes), peer.pack_references(tags, references, *sizes))


def test_a_wrong_layout_is_seen():
    """The comparison itself can fail: one ulp in one position."""
    ours, theirs = (pack([1], 20, 4, 6, 3, ("last",)) for pack in (layouts.pack, peer.pack))
    ours.position_ids[1, 0] = torch.nextafter(ours.position_ids[1, 0], torch.tensor(0.0, dtype=torch.float64))
    with pytest.raises(AssertionError, match="position_ids"):
        assert_same(ours, theirs)


# --- the chain --------------------------------------------------------------------------------------------------------


def outputs(module, dtype, sizes):
    """Every stage, chained, for a batch of two, and the gradients of all that has one."""
    num_timesteps, seq_len, hidden, embed, inner, channels = sizes
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    indices, tags = layouts.interleaved(seq_len, num_timesteps, 2)
    index = indices * geometry.MODALITIES + tags
    embedder = [drawn(*s, dtype=torch.float32) for s in ((inner, channels), (inner,), (embed, inner), (embed,))]
    weight, bias = drawn(18 * hidden, embed), drawn(18 * hidden)
    rows, sublayer, gain = drawn(2, seq_len, hidden), drawn(2, seq_len, hidden), drawn(hidden)
    out_weight, out_bias = drawn(2 * hidden, embed), drawn(2 * hidden)

    features = module.timestep_sinusoid(layouts.timesteps(num_timesteps, 1), channels)
    temb = module.timestep_mlp(features, *embedder)
    table = module.adaln_projection(temb, weight, bias)
    six = module.adaln_row_gather(provider.table_rows(table), index)
    fused = module.adaln_modulation(temb, weight, bias, index)
    shift, scale, gate = provider.table_rows(table).chunk(6, -1)[:3]
    normed = module.rmsnorm_modulated(rows, gain, shift, scale, index)
    gated = module.adaln_gate_residual(rows, sublayer, gate, index)
    last = module.final_adaln_out(gated, gain, temb, out_weight, out_bias, indices)
    made = [features, temb, table, *six, *fused, normed, gated, last]
    leaves = [*embedder, weight, bias, rows, sublayer, gain, out_weight, out_bias]
    ends = [*six, *fused, normed, last]
    grads = torch.autograd.grad(ends, leaves, [drawn(*end.shape).detach() for end in ends])
    return [*made, *grads]


SIZES = ((1, 3, 16, 8, 16, 256), (3, 40, 48, 24, 48, 256), (4, 257, 64, 32, 64, 64), (2, 65, 23, 12, 20, 16))
"""T, S, H, D, width of the embedder, time channels."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_provider_has_the_bits_of_diffusers(dtype, sizes):
    ours, theirs = outputs(provider, dtype, sizes), outputs(peer, dtype, sizes)
    assert [same_bits(one, other) for one, other in zip(ours, theirs, strict=True)] == [True] * len(ours)


def test_a_provider_that_rounds_once_less_is_seen(monkeypatch):
    def wrong(x, weight, shift, scale, index, eps=1e-5):
        normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
        return (normed * (1 + scale[index].float()) + shift[index].float()).to(x.dtype)

    monkeypatch.setattr(provider, "rmsnorm_modulated", wrong)
    ours, theirs = outputs(provider, torch.bfloat16, SIZES[1]), outputs(peer, torch.bfloat16, SIZES[1])
    differing = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if not same_bits(*pair)]
    assert 15 in differing and not set(range(15)) & set(differing)


def test_the_whole_block_is_what_the_stages_say():
    """The block run as it is, modules and all, passes the values that the stages catch one at a time."""
    hidden, embed = 16, 8
    block = peer.modeling().MiniMaxH3TransformerBlock(hidden, 1, 16, 24, embed, 1e-5, 1e-5).bfloat16()
    torch.nn.init.normal_(block.norm1.weight)
    temb = torch.randn(2, embed)
    indices, tags = layouts.interleaved(9, 2, 0)
    index, rows = indices * 3 + tags, torch.randn(1, 9, hidden).bfloat16()
    caught = {}
    block.attn.register_forward_hook(lambda _, given, output: caught.update(normed=given[0], sublayer=output))
    block.norm2.register_forward_pre_hook(lambda _, given: caught.update(residual=given[0]))
    rotary = (torch.ones(9, 6), torch.zeros(9, 6))
    with torch.no_grad():
        block(rows, temb, index, rotary)
        linear = block.adaln_proj.linear
        table = provider.table_rows(provider.adaln_projection(temb, linear.weight, linear.bias))
        shift, scale, gate = table.chunk(6, -1)[:3]
        for module in (provider, peer):
            normed = module.rmsnorm_modulated(rows, block.norm1.weight, shift, scale, index)
            assert same_bits(normed, caught["normed"])
            gated = module.adaln_gate_residual(rows, caught["sublayer"], gate, index)
            assert same_bits(gated, caught["residual"])


def test_a_block_that_changed_is_an_error(monkeypatch):
    class Other(peer.modeling().MiniMaxH3TransformerBlock):
        def forward(self, hidden, *rest):
            return hidden

    monkeypatch.setattr(peer.modeling(), "MiniMaxH3TransformerBlock", Other)
    rows, index = torch.zeros(1, 2, 16), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="no longer calls norm2"):
        peer.adaln_gate_residual(rows, rows, torch.zeros(1, 16), index)


def test_the_peer_is_named_and_known(monkeypatch):
    assert peer.missing() is None
    assert peer.source_digest() in peer.VERIFIED
    assert peer.version() == f"diffusers {peer.VERIFIED[peer.source_digest()]} (the source that was compared)"
    monkeypatch.setattr(peer, "VERIFIED", {})
    assert "not compared before: source " in peer.version()


def test_a_missing_diffusers_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.models.transformers", None)
    peer.modeling.cache_clear()
    try:
        assert "pip install 'diffusers==0.42.1'" in peer.missing()
        with pytest.raises(ImportError, match="diffusers cannot be used"):
            record.the_peer("diffusers")
        assert "provider" in record.the_peer(None)[0]
    finally:
        peer.modeling.cache_clear()


# --- the replay -------------------------------------------------------------------------------------------------------


def test_the_provider_replayed_beside_diffusers_never_leaves_it():
    """Bit for bit through the chain and the gradients, which is why it may stand in for diffusers."""
    drawn = weights.synthetic(0, geometry.reduced(32))
    providers = {name: getattr(provider, name) for name in stages.CONDITIONING.names}
    result = replay.replay(
        drawn,
        timesteps=[1, 3],
        seq_lens=[3, 65],
        candidate=Candidate(providers),
        with_backward=True,
    )
    assert result.peer == peer.version()
    for case in result.cases:
        assert case.first_drift is None and case.first_isolated_drift is None
        for leaf in case.gradients.leaves:
            assert leaf.modes["separate"] == leaf.modes["peer"]


def test_the_command_takes_diffusers_by_itself(tmp_path, monkeypatch):
    monkeypatch.delenv(weights.VARIABLE, raising=False)
    words = ("replay", "minimax-h3", "--stage", "conditioning", "--device", "cpu")
    sizes = ("--width", "16", "--timesteps", "2", "--seq-lens", "5")
    result = CliRunner().invoke(cli.build(words), [*words, *sizes, "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "r.json").read_text())["peer"] == peer.version()


def test_importing_our_modules_loads_no_diffusers():
    script = (
        "import sys, samebits\n"
        "from samebits.models.minimax_h3 import layouts, weights, prepare, provider, golden, replay, peer\n"
        "print([name for name in ('diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(Path(peer.__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]", done.stderr
