"""Free text that the machine already has: Python's standard library for code, Debian's documentation for prose."""

import gzip
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

LICENSES = Path("/usr/share/common-licenses")
DOCS = Path("/usr/share/doc")
MAN = Path("/usr/share/man")
DPKG = Path("/var/lib/dpkg")
COPYRIGHT_FORMAT = b"packaging-manuals/copyright-format/1.0"
MAN_SECTIONS = ("man1", "man5", "man7", "man8")
DOC_NAMES = re.compile(r"(?i)^(readme|news|faq|howto|manual|intro|tutorial|guide).*|.*\.(txt|md|rst)(\.gz)?$")
# Not prose: histories, contacts, and lists made by machines.
DOC_REFUSED = re.compile(
    r"(?i)change|copyright|authors|thanks|contrib|top_level|entry_points|requires|sources"
)
CODE_REFUSED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings"}
LARGEST = 120_000
SMALLEST = 400

FONT = re.compile(r"\\f(?:\[[^\]]*\]|\(..|.)|\\s[+-]?\d+|\\[&|^/,%)]")
NAMED = {
    r"\-": "-",
    r"\(aq": "'",
    r"\(dq": '"',
    r"\(bu": "*",
    r"\(em": " - ",
    r"\(en": "-",
    r"\e": "\\",
    r"\ ": " ",
}
KEPT_MACROS = {"B", "I", "BR", "BI", "IR", "IB", "RB", "RI", "SM", "SB", "Nm", "Nd", "Fl", "Ar", "Pa", "Xr"}
BREAK_MACROS = {"PP", "P", "LP", "TP", "IP", "Pp", "It", "sp", "HP"}


def spread(name: str) -> int:
    """A number that depends on `name` alone: it orders the files and chooses the held-out tenth."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def held_out(name: str) -> bool:
    return spread(name) % 10 == 0


def python_files() -> dict[str, Path]:
    """Standard library modules by name, relative to the library: the same names in each Python release."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not CODE_REFUSED.intersection(name.parts):
            found[str(name)] = path
    return found


def free_packages() -> set[str]:
    """Installed packages of Debian's free archive, as their machine-readable copyright file and their section tell.

    A package that a vendor ships (with man pages of its own licence) has no such file, and stays out.
    """
    free = set()
    for entry in (DPKG / "status").read_text(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Section): (\S+)$", entry, re.MULTILINE))
        if "Package" not in fields or fields.get("Section", "").startswith(("non-free", "contrib")):
            continue
        notice = DOCS / fields["Package"] / "copyright"
        if notice.is_file() and COPYRIGHT_FORMAT in notice.read_bytes()[:2_000]:
            free.add(fields["Package"])
    return free


def packaged_files() -> Iterator[str]:
    """Names of the files of free packages."""
    free = free_packages()
    for listed in sorted((DPKG / "info").glob("*.list")):
        if listed.name.removesuffix(".list").partition(":")[0] in free:
            yield from listed.read_text().splitlines()


def prose_files() -> dict[str, Path]:
    """Licences, package documentation and English man pages that are installed here; empty off Debian."""
    found = {f"licence/{path.name}": path for path in sorted(LICENSES.glob("*")) if not path.is_symlink()}
    if not (DPKG / "status").is_file():
        return found
    manuals = {str(MAN / section) for section in MAN_SECTIONS}
    for line in packaged_files():
        folder, _, name = line.rpartition("/")
        if folder in manuals and name.endswith(".gz"):
            found[f"man/{name}"] = Path(line)
        elif line.startswith(f"{DOCS}/") and DOC_NAMES.match(name) and not DOC_REFUSED.search(name):
            found[f"doc/{line.removeprefix(f'{DOCS}/')}"] = Path(line)
    return {name: path for name, path in found.items() if path.is_file()}


def read_text(path: Path) -> str | None:
    """The file's text; None if it isn't UTF-8, is mostly not English, or is no regular file."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    if not text.isascii() and sum(character > "~" for character in text) * 50 > len(text):
        return None
    return text.replace("\r\n", "\n").expandtabs(8)[:LARGEST]


def roff_line(line: str) -> str | None:
    """One line of a man page as plain text; None for a line that only formats."""
    if line[:1] in (".", "'"):
        macro, _, rest = line[1:].strip().partition(" ")
        if macro in BREAK_MACROS:
            return ""
        if macro in ("SH", "SS", "Sh", "Ss"):
            line = "\n" + rest.replace('"', "").strip()
        elif macro in KEPT_MACROS:
            line = rest.replace('" "', "").replace('"', "")
        else:
            return None
    line = FONT.sub("", line)
    for mark, plain in NAMED.items():
        line = line.replace(mark, plain)
    return line


def roff_text(source: str) -> str:
    """A man page without its markup. Macro definitions are dropped, paragraphs are kept."""
    lines: list[str] = []
    defining = False
    for line in source.splitlines():
        if line.startswith((".de ", ".ig", ".de1 ", "'de ")):
            defining = True
        elif defining:
            defining = line.strip() not in ("..", "'br\\}")
        elif (plain := roff_line(line)) is not None and "\\" not in plain:
            lines.append(plain)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def without_repeats(text: str, seen: set[int]) -> str:
    """`text` without the paragraphs that are in `seen`, to which its own are added."""
    kept = []
    for paragraph in text.split("\n\n"):
        mark = spread(" ".join(paragraph.split()))
        if len(paragraph) < 40 or mark not in seen:
            kept.append(paragraph)
        seen.add(mark)
    return "\n\n".join(kept)


def split_texts(files: dict[str, Path], *, held: bool, limit: int) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of one split, in an order that depends on names alone, until `limit` characters.

    A paragraph counts once. Training text also leaves out what the held-out text says, since licences and
    documentation repeat each other; for that the whole held-out split is read first.
    """
    names = sorted(files, key=spread)
    seen: set[int] = set()
    if not held:
        for _ in texts((name for name in names if held_out(name)), files, seen):
            pass
    total = 0
    for name, text in texts((name for name in names if held_out(name) is held), files, seen):
        yield name, text
        total += len(text)
        if total >= limit:
            return


def texts(names: Iterable[str], files: dict[str, Path], seen: set[int]) -> Iterator[tuple[str, str]]:
    for name in names:
        text = read_text(files[name])
        if text is None:
            continue
        if name.startswith("man/"):
            text = roff_text(text)
        text = without_repeats(text, seen)
        if len(text) >= SMALLEST:
            yield name, text
