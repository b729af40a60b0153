"""Find foreign code: one file, or all of a folder such as a Triton cache; PTX and cubin of one stem belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samebits.audit import ptx, sass
from samebits.audit.code import AuditError, Module
from samebits.audit.compile import pair

SUFFIXES = (".cubin", ".ptx")


@dataclass(frozen=True)
class Target:
    """A cubin, a PTX file, or both of one build."""

    label: str
    ptx: Path | None
    cubin: Path | None

    def read(self) -> tuple[Module | None, Module | None]:
        """PTX and SASS, whichever exist. :class:`AuditError` if one of them cannot be read."""
        try:
            text = ptx.parse(self.ptx.read_bytes().decode()) if self.ptx else None
            code = sass.disassemble(self.cubin.read_bytes()) if self.cubin else None
        except (OSError, UnicodeDecodeError) as error:
            raise AuditError(str(error)) from error
        if text is not None and code is not None:
            pair(text, code)
        return text, code


def find(path: Path) -> tuple[Target, ...]:
    """Everything under ``path``. ValueError if there is no code: an audit of nothing must not pass."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: expected a .cubin or .ptx file, or a folder of them")
        return (Target(str(path), *((path, None) if path.suffix == ".ptx" else (None, path))),)
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    stems: dict[Path, dict[str, Path]] = {}
    for file in sorted(path.rglob("*")):
        if file.suffix in SUFFIXES and not file.is_dir():
            stems.setdefault(file.with_suffix(""), {})[file.suffix] = file
    if not stems:
        raise ValueError(f"{path}: no .cubin or .ptx file in this folder or below it")
    return tuple(
        Target(str(stem.relative_to(path)), files.get(".ptx"), files.get(".cubin")) for stem, files in stems.items()
    )
