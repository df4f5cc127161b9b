"""Text that must not be in the repository, and text that must be there in a fixed shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.source import ROOT, Finding, excuse, files, relative

#: Paths of the machines this was written on, hosts of package registries, and who wrote what: none belongs to the project.
FORBIDDEN = re.compile(
    r"/work/(main|shared)\b|/tmp/[A-H]/|/tmp/brief|/root/\.(pyenv|cache|config)|/opt/(wheels|pypi)|/home/\w+/"
    r"|pypi\.org|pythonhosted\.org|registry\.npmjs\.org|\b(deb|snapshot|security|ftp)\.debian\.org|\b(helper|engineer) [A-H]\b"
)
ADR_HEADINGS = ["Context", "Decision", "Consequences", "Status"]
CHANGE_KINDS = {"Added", "Changed", "Deprecated", "Fixed", "Removed", "Security"}


def texts() -> Iterator[tuple[Path, str]]:
    for path in files():
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


def test_no_machine_paths_and_no_registry_hosts() -> None:
    found = [
        Finding(
            relative(path), text.count("\n", 0, match.start()) + 1, "", f"{match[0]!r} belongs to a machine, not to the project"
        )
        for path, text in texts()
        for match in FORBIDDEN.finditer(text)
    ]
    left, stale = excuse("machine-path", found)
    assert not left and not stale, "\n" + "\n".join([*map(str, left), *stale])


@pytest.mark.parametrize(
    "text", ["/work/main/x", "see https://pypi.org/simple", "/root/.pyenv/bin", "URIs: http://deb.debian.org/debian"]
)
def test_the_pattern_catches(text: str) -> None:
    assert FORBIDDEN.search(text)


def test_files_end_with_one_newline() -> None:
    bad = [relative(path) for path, text in texts() if text and (not text.endswith("\n") or text.endswith("\n\n"))]
    assert not bad


def decisions() -> list[Path]:
    return sorted(path for path in (ROOT / "docs/adr").glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("path", decisions(), ids=lambda path: path.stem)
def test_a_decision_record_has_its_headings(path: Path) -> None:
    text = path.read_text()
    number = int(path.name[:4])
    assert re.match(rf"# {number}\. \S", text), "the title is '# NUMBER. Title'"
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ADR_HEADINGS
    status = text.split("## Status", 1)[1].strip()
    assert re.match(r"(Proposed|Accepted|Superseded by \[ADR \d+\]\(.+\)), \d{4}-\d{2}\.", status)


def test_decision_records_are_numbered_without_gaps_and_listed() -> None:
    names = [path.name for path in decisions()]
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    index = (ROOT / "docs/adr/README.md").read_text()
    listed = re.findall(r"^- \[(\d+)\. (.+)\]\((.+)\)$", index, re.MULTILINE)
    titles = [path.read_text().splitlines()[0].removeprefix("# ") for path in decisions()]
    assert [f"{number}. {title}" for number, title, _ in listed] == titles
    assert [file for _, _, file in listed] == names


def test_the_changelog_has_its_shape() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert lines[0] == "# Changelog"
    versions = [line for line in lines if line.startswith("## ")]
    assert versions and versions[0] == "## Unreleased", "the first section is '## Unreleased'"
    assert all(re.fullmatch(r"## \d+\.\d+\.\d+ \(\d{4}-\d{2}-\d{2}\)", line) for line in versions[1:])
    assert {line.removeprefix("### ") for line in lines if line.startswith("### ")} <= CHANGE_KINDS
    body = [line for line in lines[lines.index(versions[0]) + 1 :] if line]
    assert all(re.match(r"(## |### |- [A-Z`]|  \S)", line) for line in body), "entries are '- Sentence', continued by two spaces"


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in files(".md"):
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{relative(path)}: {target}")
    assert not broken
