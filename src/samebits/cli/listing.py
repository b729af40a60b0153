"""``samebits list``: reads declarations and golden files only, so it needs no torch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from samebits import catalogue, environment
from samebits.catalogue import Declared


def list_operators(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """Operators, contracts, exactness, backends, and where each contract was proven."""
    from samebits.cli import output

    goldens = golden_files()
    entries = [entry for name in catalogue.names() for entry in _entries(catalogue.declared(name), goldens)]
    if as_json:
        output.print_json(entries)
        return
    table = output.table("Operators", "operator", "contract", "exactness", "backends", "proven on", "what it fixes")
    last = ""
    for entry in entries:
        table.add_row(
            entry["operator"] if entry["operator"] != last else "",
            entry["contract"] + (" (default)" if entry["default"] else ""),
            entry["exactness"],
            ", ".join(entry["backends"]),
            "; ".join(entry["proven"]) or "[dim]nowhere yet[/dim]",
            entry["summary"],
        )
        last = entry["operator"]
    output.console().print(table)


def _entries(spec: Declared, goldens: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for contract in spec.contracts:
        proven = [
            f"{p.arch} ({p.device}, torch {p.torch})" + (f": {p.note}" if p.note else "") for p in contract.proofs
        ]
        for arch, golden in goldens.items():
            count = sum(key.startswith(f"{spec.name}/{contract.name}/") for key in golden["digests"])
            if count:
                proven.append(f"{arch} ({count} digests)")
        found.append(
            {
                "operator": spec.name,
                "contract": contract.name,
                "default": contract is spec.default_contract,
                "exactness": contract.exactness,
                "backends": [backend.name for backend in spec.backends],
                "proven": proven,
                "summary": contract.summary,
            }
        )
    return found


def golden_files() -> dict[str, dict[str, Any]]:
    """Golden files of the checkout by where their digests hold; none where the package was installed."""
    root = environment.checkout()
    folder = None if root is None else root / "tests" / "golden"
    if folder is None or not folder.is_dir():
        return {}
    files = [path for path in sorted(folder.glob("*.json")) if path.stem == "portable" or path.stem.startswith("sm_")]
    return {"any machine" if path.stem == "portable" else path.stem: json.loads(path.read_text()) for path in files}
