import gzip
from pathlib import Path

import pytest


def test_the_same_seed_gives_the_same_text() -> None:
    import corpus

    for domain in ("structured", "chat"):
        first = corpus.digest(corpus.documents(domain, "heldout", limit=30_000))
        assert corpus.digest(corpus.documents(domain, "heldout", limit=30_000)) == first
        assert corpus.digest(corpus.documents(domain, "heldout", limit=30_000, seed=1)) != first


def test_generated_records_never_change_for_a_seed() -> None:
    import corpus
    import corpus_records

    assert corpus.digest(list(corpus_records.documents(7, 20_000))) == "cb530a2ee0ff1624"


@pytest.mark.parametrize("domain", ["code", "structured", "chat"])
def test_each_domain_has_text_in_both_splits_and_shares_none(domain: str) -> None:
    import corpus

    train = corpus.documents(domain, "train", limit=60_000)
    held = corpus.documents(domain, "heldout", limit=60_000)
    assert sum(map(len, train)) >= 60_000
    assert sum(map(len, held)) >= 60_000
    assert not set(train) & set(held)


def test_what_is_held_out_depends_on_the_name_alone() -> None:
    import corpus_sources

    names = [f"file{number}.py" for number in range(2_000)]
    held = [name for name in names if corpus_sources.held_out(name)]
    assert 150 < len(held) < 250
    assert held == [name for name in names if corpus_sources.held_out(name)]


def test_training_text_leaves_out_paragraphs_of_the_held_out_text(tmp_path: Path) -> None:
    import corpus_sources

    names = [f"file{number}" for number in range(30)]
    said_often = "This paragraph stands in every one of the files, as a licence does.\n\n"
    files = {}
    for name in names:
        files[name] = tmp_path / name
        files[name].write_text(said_often + f"Only {name} says so. " * 40)
    held = [text for _, text in corpus_sources.split_texts(files, held=True, limit=10**6)]
    train = [text for _, text in corpus_sources.split_texts(files, held=False, limit=10**6)]
    assert len(held) + len(train) == len(names)
    assert sum(said_often.strip() in text for text in held) == 1
    assert not any(said_often.strip() in text for text in train)


def test_man_pages_lose_their_markup(tmp_path: Path) -> None:
    import corpus_sources

    page = tmp_path / "tool.1.gz"
    source = '.de Sp\n.if t .sp\n..\n.TH TOOL 1\n.SH "NAME"\ntool \\- does \\fBone\\fR thing\n.PP\n.B "well"\n.ig\nsecret\n..\n'
    page.write_bytes(gzip.compress(source.encode()))
    text = corpus_sources.roff_text(corpus_sources.read_text(page) or "")
    assert text == "NAME\ntool - does one thing\n\nwell\n"


def test_text_that_is_not_english_or_not_utf8_is_refused(tmp_path: Path) -> None:
    import corpus_sources

    foreign, broken = tmp_path / "foreign.txt", tmp_path / "broken.txt"
    foreign.write_text("日本語の文書です。" * 50)
    broken.write_bytes(b"caf\xe9 " * 50)
    assert corpus_sources.read_text(foreign) is None
    assert corpus_sources.read_text(broken) is None
    assert corpus_sources.read_text(tmp_path / "absent.txt") is None


def test_only_free_packages_give_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import corpus_sources

    docs, dpkg = tmp_path / "doc", tmp_path / "dpkg"
    dpkg.mkdir()
    sections = {"free-tool": "utils", "vendor-tool": "utils", "blob-tool": "non-free/utils"}
    status = "".join(f"Package: {name}\nSection: {section}\n\n" for name, section in sections.items())
    (dpkg / "status").write_text(status)
    machine_readable = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
    for name, notice in (
        ("free-tool", machine_readable),
        ("vendor-tool", "Ours.\n"),
        ("blob-tool", machine_readable),
    ):
        (docs / name).mkdir(parents=True)
        (docs / name / "copyright").write_text(notice)
    monkeypatch.setattr(corpus_sources, "DOCS", docs)
    monkeypatch.setattr(corpus_sources, "DPKG", dpkg)
    assert corpus_sources.free_packages() == {"free-tool"}


def test_an_unknown_domain_or_split_is_named() -> None:
    import corpus

    with pytest.raises(ValueError, match=r"'poetry'.*code, prose, structured, chat"):
        corpus.documents("poetry", "train")
    with pytest.raises(ValueError, match=r"'test'.*train, heldout"):
        corpus.documents("code", "test")
