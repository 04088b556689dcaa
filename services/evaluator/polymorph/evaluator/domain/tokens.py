"""A source as the compiler splits it (C++17 [lex.phases]): code without comments and without what literals say.

Where a reader and the compiler disagree about where a literal or a comment ends, code hides in the difference. What
only makes that hard (raw strings, trigraphs, stray quotes) is refused instead of read.
"""

import re

# GCC joins lines also where spaces stand behind the backslash.
_SPLICE = re.compile(r"\\[ \t\v\f]*\n")
_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<raw>(?:u8|[uUL])?R")
    |(?P<literal>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
    |[A-Za-z_$][\w$]*                                   # a word: what ends in R is no prefix of a raw string
    |(?P<number>\.?[0-9](?:[eEpP][+-]|[\w.])*'?)         # compilers differ in whether a quote in it begins a literal
    """,
    re.DOTALL | re.VERBOSE | re.ASCII,
)
_INCLUDE_AHEAD = re.compile(r"[ \t]*#[ \t]*include[ \t]*")
_DIGRAPHS = {"<:": "[", ":>": "]", "<%": "{", "%>": "}", "%:": "#"}
_DIGRAPH = re.compile("|".join(_DIGRAPHS))
_ODD = (
    (re.compile(r"\?\?[=/'()!<>-]"), "a trigraph: write the character"),
    (re.compile(r"[\x00-\x08\x0b-\x1f\x7f]"), "a control character"),
)
_LEFT = (
    (re.compile(r"/\*"), "a comment without an end"),
    (re.compile(r"\\"), "a backslash outside of a literal"),
    (re.compile(r"[^\x00-\x7f]"), "a character beyond ASCII outside of comments and literals"),
)
_QUOTE = re.compile(r"[\"']")

Problems = list[tuple[int, str]]


def code_of(source: str) -> tuple[str, Problems]:
    """The code, with `""` and `''` for literals, blanks for comments, and digraphs replaced; the literal behind
    `#include` stays. With it the reasons why the source cannot be read, each with its line.
    """
    text = _SPLICE.sub("", source.replace("\r\n", "\n"))
    problems: Problems = [(match.start(), why) for odd, why in _ODD for match in odd.finditer(text)]
    parts: list[str] = []
    end = 0
    for match in _TOKEN.finditer(text):
        between = text[end : match.start()]
        parts.append(between)
        problems += _left(between, end)
        if match["raw"] is not None:
            problems.append((match.start(), "a raw string: write it with escapes"))
        if (match["number"] or "").endswith("'"):
            problems.append((match.start(), "a quote in a number: write its digits together"))
        parts.append(_shown(match, text))
        end = match.end()
    parts.append(text[end:])
    problems += _left(text[end:], end)
    code = _DIGRAPH.sub(lambda match: _DIGRAPHS[match[0]], "".join(parts))
    return code, [(text.count("\n", 0, at) + 1, why) for at, why in problems]


def _left(between: str, start: int) -> Problems:
    found = [(start + match.start(), why) for left, why in _LEFT for match in left.finditer(between)]
    return found + [(start + m.start(), "a quote without its partner") for m in _QUOTE.finditer(between)]


def _shown(match: re.Match[str], text: str) -> str:
    if match["comment"] is not None:
        return "\n" * match[0].count("\n") or " "
    if match["literal"] is None:
        return match[0]
    line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
    return match[0] if _INCLUDE_AHEAD.fullmatch(line) else match[0][0] * 2
