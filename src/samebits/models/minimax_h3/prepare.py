"""From the published checkpoint to the few tensors that are needed, each verified before anything is written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from samebits.exact.bits import digest
from samebits.models.minimax_h3 import manifest as manifests
from samebits.models.minimax_h3 import weights
from samebits.models.minimax_h3.manifest import Manifest, ManifestError

Fetch = Callable[[str], Path]
"""From the name of a file of the checkpoint to where it lies on this machine."""


def prepare(
    out: Path,
    fetch: Fetch,
    *,
    block: bool = False,
    manifest: Manifest | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Verify the files, take the tensors out, verify those, and write them to ``out``.

    Args:
        out: folder of what is written: the conditioning tensors, and with ``block`` a second file with the rest of block 0.
        fetch: how to get a file; :func:`from_hub` or :func:`from_folder`.
        say: told what is going on, a line at a time.

    Raises:
        ManifestError: a file or tensor is not the published one, or a tensor lies in a shard that is not pinned. Nothing
            is written then.
    """
    pinned = manifest or manifests.read()
    checked: dict[str, Path] = {}

    def verified(name: str) -> Path:
        if name not in checked:
            if name not in pinned.files:
                raise ManifestError(f"{name}: this file is not pinned in the manifest")
            path = fetch(name)
            say(f"verifying {name}")
            pinned.files[name].check(name, path)
            checked[name] = path
        return checked[name]

    verified("config.json")
    shard_of = json.loads(verified(pinned.index).read_text())["weight_map"]
    found = {}
    for in_block in (False, True) if block else (False,):
        found[in_block] = _extract(pinned, in_block, shard_of, verified)
    written = []
    for in_block, tensors in found.items():
        path = out / (weights.BLOCK_FILE if in_block else weights.CONDITIONING_FILE)
        unpublished = [name for name, entry in pinned.section(in_block).items() if entry.sha256 is None]
        digests = {name: digest(tensors[name]) for name in unpublished}
        _write(path, tensors, {"manifest": pinned.name, "revision": pinned.revision, "digests": digests})
        say(f"wrote {path}")
        written.append(path)
    return written


def _extract(
    pinned: Manifest, block: bool, shard_of: Mapping[str, str], verified: Callable[[str], Path]
) -> dict[str, Tensor]:
    from safetensors import safe_open

    tensors = {}
    for name, entry in pinned.section(block).items():
        if name not in shard_of:
            raise ManifestError(f"{name}: the index of the checkpoint does not have it")
        with safe_open(verified(shard_of[name]), framework="pt") as shard:
            if name not in shard.keys():  # noqa: SIM118
                raise ManifestError(f"{name}: not in {shard_of[name]}, where the index has it")
            tensors[name] = shard.get_tensor(name)
        entry.check(name, tensors[name])
    return tensors


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Whole or not at all: to a file beside it, which then takes its name."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(dict(tensors), temporary, metadata={weights.METADATA: json.dumps(metadata, sort_keys=True)})
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# --- where the files come from ----------------------------------------------------------------------------------------


def from_folder(folder: Path) -> Fetch:
    """Files that are here already, laid out as in the checkpoint's ``transformer`` folder."""

    def fetch(name: str) -> Path:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return path

    return fetch


def from_hub(download: Path, manifest: Manifest | None = None) -> Fetch:
    """Download each file at the pinned revision into ``download``. Needs the network and ``huggingface_hub``.

    Raises:
        ModuleNotFoundError: huggingface_hub is not installed; the message names the way without it.
    """
    pinned = manifest or manifests.read()
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "downloading needs huggingface_hub (pip install huggingface_hub); or download "
            f"{', '.join(pinned.files)} of {pinned.repository}/{pinned.subfolder} at revision {pinned.revision} "
            "yourself and name their folder with --from",
            name="huggingface_hub",
        ) from error

    def fetch(name: str) -> Path:
        return Path(
            huggingface_hub.hf_hub_download(
                pinned.repository,
                name,
                subfolder=pinned.subfolder,
                revision=pinned.revision,
                local_dir=download,
            )
        )

    return fetch
