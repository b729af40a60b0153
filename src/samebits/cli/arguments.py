"""Parsing of the options that several commands share."""

from __future__ import annotations

from samebits.cli.errors import UserError


def sizes(given: list[str]) -> dict[str, int]:
    """``["D=4096"]`` as ``{"D": 4096}``."""
    parsed: dict[str, int] = {}
    for text in given:
        axis, separator, value = text.partition("=")
        if not separator or not axis or not value.isdecimal():
            raise UserError(f"--size {text!r}: expected AXIS=NUMBER, e.g. --size D=4096")
        parsed[axis] = int(value)
    return parsed


def rows(given: list[int]) -> tuple[int, ...]:
    for value in given:
        if value < 0:
            raise UserError(f"--rows {value}: expected a number of at least 0")
    return tuple(given)
