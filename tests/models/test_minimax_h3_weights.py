"""The manifest, and preparing and loading weights: with small stand-in files, since the checkpoint has tens of gigabytes."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from samebits import cli
from samebits.exact.bits import digest
from samebits.exact.compare import same_bits
from samebits.models import minimax_h3 as PACKAGE
from samebits.models.minimax_h3 import manifest, prepare, weights
from samebits.models.minimax_h3.geometry import OFFICIAL, reduced
from samebits.verify import inputs

SMALL = reduced(16)
SHARD, OTHER, INDEX = "shard-1.safetensors", "shard-2.safetensors", "index.json"


class Checkpoint:
    """A folder laid out like the published one, and a manifest that pins it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = dict(weights.synthetic(1, SMALL).tensors)
        self.block = {"transformer_blocks.0.ff.net.2.weight": torch.arange(12.0).view(3, 4).bfloat16()}
        everything = self.tensors | self.block
        save_file(everything | {"not.needed": torch.ones(2)}, folder / SHARD)
        save_file({"elsewhere": torch.ones(2)}, folder / OTHER)
        self.write_index(dict.fromkeys(everything, SHARD))
        (folder / "config.json").write_text("{}")
        self.content = {
            "name": "small",
            "repository": "nobody/nothing",
            "revision": "0" * 40,
            "subfolder": "transformer",
            "architecture": "none",
            "index": INDEX,
            "files": {},
            "tensors": {name: self.entry(tensor) for name, tensor in self.tensors.items()},
            "block_tensors": {name: self.entry(tensor) | {"sha256": None} for name, tensor in self.block.items()},
        }
        self.pin()

    def entry(self, tensor):
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "sha256": digest(tensor),
        }

    def write_index(self, shards):
        (self.folder / INDEX).write_text(json.dumps({"weight_map": shards}))

    def pin(self):
        """Take the files as they are for the published ones."""
        for name in ("config.json", INDEX, SHARD):
            data = (self.folder / name).read_bytes()
            self.content["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    @property
    def manifest(self):
        return manifest.parse(self.content)

    def prepare(self, out, **options):
        fetch = prepare.from_folder(self.folder)
        return prepare.prepare(out, fetch, manifest=self.manifest, say=lambda line: None, **options)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    return Checkpoint(folder)


def flip(path, position=-1):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_the_manifest_pins_exactly_the_tensors_of_the_chain():
    pinned = manifest.read()
    found = {name: (getattr(torch, entry.dtype), entry.shape) for name, entry in pinned.tensors.items()}
    assert found == OFFICIAL.shapes()
    assert pinned.repository == "MiniMaxAI/MiniMax-H3" and len(pinned.revision) == 40
    digests = [entry.sha256 for entry in (*pinned.tensors.values(), *pinned.files.values())]
    assert all(digest is not None and len(digest) == 64 and int(digest, 16) for digest in digests)
    assert len(set(digests)) == 15


def test_published_digests_are_the_published_ones():
    pinned = manifest.read()
    assert pinned.tensors["norm_out.linear.bias"].sha256.startswith("3b12cdc7bbda")
    assert pinned.block_tensors["transformer_blocks.0.ff.net.2.weight"].sha256.startswith("e19d4e1649e4")
    assert len(pinned.block_tensors) == 8
    (shard,) = (entry for name, entry in pinned.files.items() if name.endswith(".safetensors"))
    assert shard.size == 4_825_958_704


def test_an_unknown_dtype_in_a_manifest_is_refused(checkpoint):
    checkpoint.content["tensors"]["norm_out.norm.weight"]["dtype"] = "float17"
    with pytest.raises(ValueError, match=r"norm_out\.norm\.weight has an unknown dtype 'float17'"):
        checkpoint.manifest  # noqa: B018


# --- prepare ----------------------------------------------------------------------------------------------------------


def test_prepare_and_load(checkpoint, tmp_path):
    out = tmp_path / "out"
    (written,) = checkpoint.prepare(out)
    assert [path.name for path in out.iterdir()] == [weights.CONDITIONING_FILE]
    loaded = weights.load(out, manifest=checkpoint.manifest)
    assert {name: digest(t) for name, t in loaded.items()} == {n: digest(t) for n, t in checkpoint.tensors.items()}
    with safe_open(written, framework="pt") as file:
        assert json.loads(file.metadata()[weights.METADATA])["revision"] == "0" * 40


def test_the_block_goes_to_a_second_file_and_changes_nothing_in_the_first(checkpoint, tmp_path):
    (alone,) = checkpoint.prepare(tmp_path / "alone")
    first, second = checkpoint.prepare(tmp_path / "both", block=True)
    assert first.read_bytes() == alone.read_bytes()
    assert second.name == weights.BLOCK_FILE
    loaded = weights.load(tmp_path / "both", block=True, manifest=checkpoint.manifest)
    assert list(loaded) == list(checkpoint.block)
    flip(second)  # its digest was not published, so the one taken when it was extracted must notice
    with pytest.raises(manifest.ManifestError, match=r"ff\.net\.2\.weight: sha256 .* when it was extracted"):
        weights.load(tmp_path / "both", block=True, manifest=checkpoint.manifest)


def tamper_config(checkpoint):
    flip(checkpoint.folder / "config.json")


def tamper_shard_length(checkpoint):
    with (checkpoint.folder / SHARD).open("ab") as file:
        file.write(b"x")


def tamper_shard(checkpoint):
    flip(checkpoint.folder / SHARD)


def tamper_tensor(checkpoint):
    """A byte of one tensor, in a shard that is then pinned as it is: only the tensor's own digest is left to notice."""
    name = "norm_out.linear.bias"
    changed = {n: t.clone() for n, t in (checkpoint.tensors | checkpoint.block).items()}
    changed[name].view(torch.int16)[3] ^= 1
    save_file(changed, checkpoint.folder / SHARD)
    checkpoint.pin()


def tamper_shape(checkpoint):
    checkpoint.content["tensors"]["norm_out.norm.weight"]["shape"] = [4, 4]


def tamper_dtype(checkpoint):
    checkpoint.content["tensors"]["norm_out.norm.weight"]["dtype"] = "float16"


def tamper_missing(checkpoint):
    checkpoint.write_index(dict.fromkeys(list(checkpoint.tensors)[1:], SHARD))
    checkpoint.pin()


def tamper_unpinned(checkpoint):
    checkpoint.write_index(dict.fromkeys(checkpoint.tensors, OTHER))
    checkpoint.pin()


def tamper_index(checkpoint):
    """The index names a shard that does not have the tensor."""
    checkpoint.content["tensors"]["elsewhere"] = checkpoint.entry(torch.ones(2))
    checkpoint.write_index(dict.fromkeys([*checkpoint.tensors, "elsewhere"], SHARD))
    checkpoint.pin()


FAULTS = {
    tamper_config: "config.json: sha256 .*, the manifest has",
    tamper_shard_length: r"shard-1.safetensors: \d+ bytes, the manifest has",
    tamper_shard: "shard-1.safetensors: sha256 .*, the manifest has",
    tamper_tensor: r"norm_out\.linear\.bias: sha256 .*, the manifest has",
    tamper_shape: r"norm_out\.norm\.weight: shape \(16,\), the manifest has \(4, 4\)",
    tamper_dtype: r"norm_out\.norm\.weight: dtype bfloat16, the manifest has float16",
    tamper_missing: r"time_embedder\.linear_1\.weight: the index of the checkpoint does not have it",
    tamper_unpinned: "shard-2.safetensors: this file is not pinned",
    tamper_index: "elsewhere: not in shard-1.safetensors, where the index has it",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_is_written_from_a_checkpoint_that_is_not_the_published_one(checkpoint, tmp_path, fault):
    fault(checkpoint)
    with pytest.raises(manifest.ManifestError, match=FAULTS[fault]):
        checkpoint.prepare(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_write_that_fails_leaves_the_old_file(checkpoint, tmp_path, monkeypatch):
    (written,) = checkpoint.prepare(tmp_path / "out")
    before = written.read_bytes()

    def fails(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(prepare.os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.prepare(tmp_path / "out")
    assert [path.name for path in written.parent.iterdir()] == [written.name]
    assert written.read_bytes() == before


# --- load -------------------------------------------------------------------------------------------------------------


def test_any_byte_of_any_tensor_is_verified(checkpoint, tmp_path):
    (written,) = checkpoint.prepare(tmp_path / "out")
    data = written.read_bytes()
    header = int.from_bytes(data[:8], "little")
    places = json.loads(data[8 : 8 + header])
    for name in checkpoint.tensors:
        begin, end = places[name]["data_offsets"]
        for position in (begin, end - 1):
            flip(written, 8 + header + position)
            with pytest.raises(manifest.ManifestError, match=f"^{name}: sha256"):
                weights.load(written.parent, manifest=checkpoint.manifest)
            flip(written, 8 + header + position)
    assert len(weights.load(written.parent, manifest=checkpoint.manifest)) == len(checkpoint.tensors)


@pytest.mark.parametrize(("change", "message"), [(-1, "missing"), (+1, "not in the manifest")])
def test_all_tensors_and_no_others(checkpoint, tmp_path, change, message):
    tensors = dict(checkpoint.tensors)
    if change < 0:
        del tensors["norm_out.norm.weight"]
    else:
        tensors["stowaway"] = torch.ones(1)
    save_file(tensors, tmp_path / weights.CONDITIONING_FILE)
    with pytest.raises(manifest.ManifestError, match=message):
        weights.load(tmp_path, manifest=checkpoint.manifest)


def test_the_order_and_metadata_of_the_file_do_not_matter(checkpoint, tmp_path):
    turned = dict(reversed(checkpoint.tensors.items()))
    save_file(turned, tmp_path / weights.CONDITIONING_FILE, metadata={"by": "another tool"})
    assert len(weights.load(tmp_path, manifest=checkpoint.manifest)) == len(turned)


def test_where_the_weights_are_looked_for(checkpoint, tmp_path, monkeypatch):
    monkeypatch.delenv(weights.VARIABLE, raising=False)
    with pytest.raises(FileNotFoundError, match=f"{weights.VARIABLE} is not set"):
        weights.load()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        weights.load(tmp_path)
    (tmp_path / weights.CONDITIONING_FILE).write_bytes(b"not one")
    with pytest.raises(manifest.ManifestError, match="not a safetensors file"):
        weights.load(tmp_path)
    checkpoint.prepare(tmp_path / "out")
    monkeypatch.setenv(weights.VARIABLE, str(tmp_path / "out"))
    assert set(weights.load(manifest=checkpoint.manifest)) == set(checkpoint.tensors)


@pytest.fixture
def optimised(monkeypatch):
    """The modules as ``python -O`` compiles them: without asserts."""
    made = {}
    for name in ("manifest", "weights", "prepare"):
        path = Path(weights.__file__).with_name(f"{name}.py")
        module = types.ModuleType(f"{PACKAGE.__name__}.{name}")
        module.__package__ = PACKAGE.__name__
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(path.read_text() + "\nassert False\n", str(path), "exec", optimize=1), module.__dict__)
        monkeypatch.setattr(PACKAGE, name, module)
        made[name] = module
    return types.SimpleNamespace(**made)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_checks_survive_python_without_asserts(checkpoint, tmp_path, optimised, fault):
    fault(checkpoint)
    pinned = optimised.manifest.parse(checkpoint.content)
    fetch = optimised.prepare.from_folder(checkpoint.folder)
    with pytest.raises(optimised.manifest.ManifestError, match=FAULTS[fault]):
        optimised.prepare.prepare(tmp_path / "out", fetch, manifest=pinned, say=lambda line: None)
    assert not (tmp_path / "out").exists()


def test_loading_survives_python_without_asserts(checkpoint, tmp_path, optimised):
    (written,) = checkpoint.prepare(tmp_path)
    flip(written)
    with pytest.raises(optimised.manifest.ManifestError, match="sha256"):
        optimised.weights.load(tmp_path, manifest=optimised.manifest.parse(checkpoint.content))


# --- the command ------------------------------------------------------------------------------------------------------


def call(*words):
    return CliRunner().invoke(cli.build(words), list(map(str, words)))


def test_the_command_refuses_files_that_are_not_the_published_ones(checkpoint, tmp_path):
    result = call("prepare", "minimax-h3", "--from", checkpoint.folder, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "config.json: sha256" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_writes_what_is_published(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "read", lambda path=None: checkpoint.manifest)
    result = call("prepare", "minimax-h3", "--from", checkpoint.folder, "--out", tmp_path / "out", "--block")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {weights.CONDITIONING_FILE, weights.BLOCK_FILE}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "deepseek-v9", "--out", "x"], "no weights are pinned for 'deepseek-v9'"),
        (["prepare", "minimax-h3", "--out", "x", "--from", "a", "--download-dir", "b"], "choose one"),
        (["prepare", "minimax-h3", "--out", "x", "--from", "not-here"], "not-here/config.json does not exist"),
    ],
)
def test_wrong_use_of_the_command(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert result.exit_code == 2 and message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_huggingface_hub_the_other_way_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = call("prepare", "minimax-h3", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install huggingface_hub" in result.stderr and "--from" in result.stderr


def test_downloads_ask_for_the_pinned_revision(checkpoint, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repository, name, **options):
        asked.append((repository, name, options))
        return str(checkpoint.folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    fetch = prepare.from_hub(tmp_path / "hf", checkpoint.manifest)
    prepare.prepare(tmp_path / "out", fetch, manifest=checkpoint.manifest, say=lambda line: None)
    assert [name for _, name, _ in asked] == ["config.json", INDEX, SHARD]  # each once
    assert all(
        options == {"subfolder": "transformer", "revision": "0" * 40, "local_dir": tmp_path / "hf"}
        for _, _, options in asked
    )


# --- synthetic --------------------------------------------------------------------------------------------------------


SYNTHETIC_DIGEST = "e1b3d45ad403654902e0dace130c94d5f9e17b782e6fec5ef6524a931fd0a0fd"


def test_synthetic_weights_are_the_same_everywhere():
    """The digest was taken once; integers and exact scaling alone decide it."""
    made = weights.synthetic(7, SMALL)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in made.tensors.items()} == SMALL.shapes()
    assert made.digest() == SYNTHETIC_DIGEST
    assert made.digest() != weights.synthetic(8, SMALL).digest()


def test_synthetic_weights_keep_the_size_of_a_row():
    made = weights.synthetic(0, reduced(256))
    for name, tensor in made.tensors.items():
        values = tensor.float()
        if tensor.dim() == 2:
            assert 0.5 < float(values.std()) * tensor.shape[1] ** 0.5 < 2, name
        elif name.endswith("norm.weight") or "norm1" in name or "norm2" in name:
            assert float(values.std()) > 0.3 and abs(float(values.mean()) - 1) < 0.2, name
        else:
            assert 0.15 < float(values.std()) < 0.35, name


def test_synthetic_weights_do_not_depend_on_how_they_are_drawn(monkeypatch):
    whole = weights.synthetic(0, SMALL)
    monkeypatch.setitem(weights._WORDS, "cpu", 7 * 16)
    assert weights.synthetic(0, SMALL).digest() == whole.digest()


@pytest.mark.parametrize("width", [0, -16, 24 + 1, 8, 5392])
def test_widths_that_no_model_has(width):
    with pytest.raises(ValueError, match="expected a multiple of 16"):
        reduced(width)
    assert reduced(OFFICIAL.hidden_size) == OFFICIAL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_synthetic_numbers_are_those_of_the_common_generator(dtype):
    """Many rows at once, in several pieces, have the bits of rows drawn one by one."""
    name, shape = "transformer_blocks.0.attn.to_q.weight", (1030, 272)
    drawn = weights.draw(name, dtype, shape, 3, torch.device("cpu"))
    rows = inputs.row_tensor(f"minimax_h3/{name}", range(1030), (272,), dtype, 3)
    assert shape[0] * shape[1] > 2 * weights._WORDS["cpu"]
    assert same_bits(drawn, rows.mul_(2.0**-4))


def test_the_parameters_of_the_block():
    drawn = weights.synthetic(0, SMALL, block=True)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in drawn.tensors.items()} == SMALL.block_shapes()
    chain = weights.synthetic(0, SMALL)
    shared = set(drawn.tensors) & set(chain.tensors)
    assert len(shared) == 8 and all(same_bits(drawn[name], chain[name]) for name in shared)
