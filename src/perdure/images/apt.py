"""Where Debian packages come from: the host's own apt sources, turned to the suite of the image.

No mirror is named in this repository. A host that installs from a mirror inside its network builds images from there too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import HostUnfit

SUITE = "trixie"
_RELEASES = ("bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing")
_SUITE = re.compile(rf"^({'|'.join(_RELEASES)})(-updates|-security)?/?$")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True, slots=True)
class Source:
    """One repository of the host: ``kind`` is "" for the release itself, "-updates" or "-security"."""

    uri: str
    kind: str
    signed_by: str | None


def mirror_lines(etc_apt: Path = Path("/etc/apt"), keyring: Path = _KEYRING) -> list[str]:
    """Lines of a sources.list for the image's suite, from this host's sources.

    Raises HostUnfit when the host has no Debian source (another distribution) or no keyring to check one with.
    """
    chosen: dict[str, Source] = {}
    for source in host_sources(etc_apt):
        chosen.setdefault(source.kind, source)
    if "" not in chosen:
        raise HostUnfit(
            "This host's apt sources name no Debian mirror, so there is nowhere to fetch the image's packages from.",
            hint="Add a Debian source under /etc/apt/sources.list.d with a keyring, or build the image on a Debian host.",
        )
    lines = []
    for kind, source in sorted(chosen.items()):
        key = str(keyring) if keyring.is_file() else source.signed_by
        if key is None:
            raise HostUnfit(
                "There is no keyring to check Debian's packages with.",
                hint="Run 'sudo apt-get install debian-archive-keyring' and try again.",
            )
        lines.append(f"deb [signed-by={key}] {source.uri} {SUITE}{kind} main")
    return lines


def host_sources(etc_apt: Path) -> Iterator[Source]:
    """Debian's own repositories among the host's sources, in apt's order of files."""
    one_line = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*.list"))]
    for path in one_line:
        if path.is_file():
            yield from _one_line_format(path.read_text(errors="replace"))
    for path in sorted((etc_apt / "sources.list.d").glob("*.sources")):
        yield from _deb822_format(path.read_text(errors="replace"))


def _one_line_format(text: str) -> Iterator[Source]:
    for line in text.splitlines():
        match = re.match(r"^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+(.*)", line)
        if match:
            key = re.search(r"signed-by=(\S+)", match[1] or "")
            yield from _debian(match[2], match[3], match[4].split(), key[1] if key else None)


def _deb822_format(text: str) -> Iterator[Source]:
    uncommented = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", uncommented):
        fields = {key.lower(): value.strip() for key, value in re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", stanza, re.MULTILINE)}
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        signed = fields.get("signed-by")
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield from _debian(uri, suite, fields.get("components", "").split(), signed)


def _debian(uri: str, suite: str, components: list[str], signed_by: str | None) -> Iterator[Source]:
    """Other vendors name their suites after Debian's too, but sign with keys of their own."""
    match = _SUITE.match(suite)
    if match and "main" in components and (signed_by is None or "debian-archive" in signed_by):
        yield Source(uri, match[2] or "", signed_by)
