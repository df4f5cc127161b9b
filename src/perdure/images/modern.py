"""Old images under new software: an image whose agent this release cannot talk to boots with a newer one.

Kernel, initrd and agent disk are no part of the root disk (DESIGN D4), so a release of them with the protocol that is spoken here
boots any image, and any workspace's disk made of it. The memory of such a workspace holds the old agent and cannot be kept; its
fingerprint says so. Which release was chosen is written beside the image and kept while it can be spoken to: another one of the
same protocol would be another machine for the same snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from perdure.core import files
from perdure.core.errors import HostUnfit
from perdure.images.agentdisk import AgentRelease, releases, sources_digest
from perdure.images.model import Image
from perdure.images.registry import ImageStore
from perdure.wire.guest import PROTOCOL

_CHOSEN = "agent-release"


def bootable(store: ImageStore, image: Image) -> Image:
    """The image as it boots here: itself, or with the chosen release in the place of its own kernel, initrd and agent disk.

    Raises HostUnfit when no release that is spoken here has been built on this node.
    """
    if image.agent_protocol == PROTOCOL:
        return image
    before = chosen(image)
    release = choose(releases(store.root), before)
    if release is None:
        raise HostUnfit(
            f"The agent of image {image.name} ({image.digest[:12]}) speaks protocol {image.agent_protocol}, this Perdure speaks "
            f"{PROTOCOL}, and no newer agent is here to put in its place.",
            hint="Run 'perdure image build --if-missing', which builds it; then wake the workspace again.",
        )
    if release.digest != before:
        files.write_file(image.directory / _CHOSEN, f"{release.digest}\n".encode())
    return replace(
        image,
        boot_directory=release.directory,
        kernel_version=release.kernel_version,
        kernel_digest=release.kernel_digest,
        agent_protocol=release.agent_protocol,
        agent_release=release.digest,
    )


def chosen(image: Image) -> str:
    """The digest of the release that the image was last booted with in the place of its own; "" if it never was."""
    note = image.directory / _CHOSEN
    return note.read_text().strip() if note.is_file() else ""


def choose(found: Iterable[AgentRelease], before: str) -> AgentRelease | None:
    """Of the releases that are spoken here the one chosen before, else that of this very version, else the newest made."""
    usable = [release for release in found if release.agent_protocol == PROTOCOL]
    mine = sources_digest()
    return max(
        usable,
        key=lambda one: (one.digest == before, one.sources_digest == mine, one.directory.stat().st_mtime_ns),
        default=None,
    )
