"""The digest of a function is that of its code on every Python, whose tokenizers differ in f-strings."""

import io
import tokenize

from samebits.models.source import digest, whole_strings

OPEN, MIDDLE, CLOSE = 901, 902, 903
SOURCE = "raise E(f\"a {x:{w}} b\"\n  f'''c\n{f\"{y}\"} d''', z)\n"
PLAIN = ["raise", "E", "(", 'f"a {x:{w}} b"', "f'''c\n{f\"{y}\"} d'''", ",", "z", ")"]


def apart() -> list[tokenize.TokenInfo]:
    """SOURCE as Python 3.12 cuts it."""
    pieces = [
        (tokenize.NAME, "raise", 1, 0),
        (tokenize.NAME, "E", 1, 6),
        (tokenize.OP, "(", 1, 7),
        (OPEN, 'f"', 1, 8),
        (MIDDLE, "a ", 1, 10),
        (tokenize.OP, "{", 1, 12),
        (tokenize.NAME, "x", 1, 13),
        (tokenize.OP, ":", 1, 14),
        (tokenize.OP, "{", 1, 15),
        (tokenize.NAME, "w", 1, 16),
        (tokenize.OP, "}", 1, 17),
        (tokenize.OP, "}", 1, 18),
        (MIDDLE, " b", 1, 19),
        (CLOSE, '"', 1, 21),
        (OPEN, "f'''", 2, 2),
        (OPEN, 'f"', 3, 1),
        (tokenize.NAME, "y", 3, 4),
        (CLOSE, '"', 3, 6),
        (MIDDLE, " d", 3, 8),
        (CLOSE, "'''", 3, 10),
        (tokenize.OP, ",", 3, 13),
        (tokenize.NAME, "z", 3, 15),
        (tokenize.OP, ")", 3, 16),
    ]
    return [
        tokenize.TokenInfo(kind, text, (row, column), (row, column + len(text)), "")
        for kind, text, row, column in pieces
    ]


def test_f_strings_come_out_whole():
    found = list(whole_strings(apart(), SOURCE, {OPEN}, {CLOSE}))
    assert [token.string for token in found] == PLAIN
    assert [token.string for token in found if token.type == tokenize.STRING] == [PLAIN[3], PLAIN[4]]


def test_tokens_without_f_strings_stay_as_they_are():
    tokens = list(tokenize.generate_tokens(io.StringIO("x = 'a' + b\n").readline))
    assert list(whole_strings(tokens, "x = 'a' + b\n", {OPEN}, {CLOSE})) == tokens


def test_one_digest_on_every_python():
    def refuse(x: int, width: int) -> None:
        """Refuses."""
        raise ValueError(f"not {x:>{width}}, {x!r}" f"{{x}}")  # fmt: skip

    assert digest(refuse) == "ef58882ead6c28f2"
