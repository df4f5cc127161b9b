"""A host on 127.0.0.2 that has what a checkout needs: git repositories, a small registry of npm packages, an index of wheels.

Workspaces reach it through the egress gateway, where the operator opens the address (``PERDURE_EGRESS_PRIVATE_ALLOW``).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

HOST = "127.0.0.2"


@dataclass(frozen=True)
class Package:
    """One version of an npm package: its modules by file name, and what it depends on."""

    name: str
    version: str
    files: Mapping[str, str]
    dependencies: Mapping[str, str] = field(default_factory=dict)

    @property
    def manifest(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "main": "index.js", "dependencies": dict(self.dependencies)}

    @property
    def tarball(self) -> bytes:
        """As ``npm pack`` makes it: everything below ``package/``."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as target:
            for name, text in {"package.json": json.dumps(self.manifest), **self.files}.items():
                member = tarfile.TarInfo(f"package/{name}")
                member.size, member.mode = len(text.encode()), 0o644
                target.addfile(member, io.BytesIO(text.encode()))
        return gzip.compress(buffer.getvalue(), mtime=0)

    @property
    def integrity(self) -> str:
        return f"sha512-{base64.b64encode(hashlib.sha512(self.tarball).digest()).decode()}"


@dataclass
class Shelf:
    """What is served, and what was asked for."""

    directory: Path
    port: int
    asked: list[str]

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def put(self, package: Package) -> None:
        """Publish a version: the tarball, and the document that lists the versions."""
        tarball = f"{package.name}-{package.version}.tgz"
        (self.directory / tarball).write_bytes(package.tarball)
        dist = {"tarball": f"{self.url}/{tarball}", "integrity": package.integrity}
        document = {
            "name": package.name,
            "dist-tags": {"latest": package.version},
            "versions": {package.version: {**package.manifest, "dist": dist}},
        }
        (self.directory / f"{package.name}.document").write_text(json.dumps(document))

    def put_wheel(self, name: str, version: str, text: str) -> str:
        """Publish a pure Python wheel (PEP 427) of one module, on its page of a simple index (PEP 503); returns its SHA-256."""
        info, page = f"{name}-{version}.dist-info", self.directory / "simple" / name
        members = {
            f"{name}.py": text,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        members[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"])
        page.mkdir(parents=True)
        wheel = page / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (page / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>')
        return digest

    def lock(self, name: str, packages: Mapping[str, Package]) -> str:
        """The text of a package-lock.json (version 3) of a project that depends on the first of these packages."""
        first = next(iter(packages.values()))
        entries: dict[str, Any] = {"": {"name": name, "version": "1.0.0", "dependencies": {first.name: first.version}}}
        for package in packages.values():
            entries[f"node_modules/{package.name}"] = {
                "version": package.version,
                "resolved": f"{self.url}/{package.name}-{package.version}.tgz",
                "integrity": package.integrity,
                "dependencies": dict(package.dependencies),
            }
        return json.dumps(
            {"name": name, "version": "1.0.0", "lockfileVersion": 3, "requires": True, "packages": entries}, indent=1
        )

    def commit(self, name: str, work: Path, files: Mapping[str, str]) -> str:
        """Publish a git repository of one commit; returns its hash."""
        who = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main")

        def git(*words: str, where: Path = work) -> str:
            done = subprocess.run(["git", *who, "-C", str(where), *words], check=True, capture_output=True, text=True)
            return done.stdout.strip()

        work.mkdir()
        git("init")
        for path, text in files.items():
            (work / path).write_text(text)
        git("add", ".")
        git("commit", "-m", "one")
        bare = self.directory / f"{name}.git"
        git("clone", "--bare", str(work), str(bare), where=work.parent)
        git("update-server-info", where=bare)
        return git("rev-parse", "HEAD")


class _Handler(SimpleHTTPRequestHandler):
    """Files, and an npm package's document at its bare name."""

    def __init__(self, asked: list[str], *arguments: Any, **options: Any) -> None:
        self.asked = asked
        super().__init__(*arguments, **options)

    def translate_path(self, path: str) -> str:
        found = Path(super().translate_path(path))
        document = found.with_name(f"{unquote(found.name)}.document")
        return str(document if document.is_file() else found)

    def guess_type(self, path: Any) -> str:
        return "application/json" if str(path).endswith(".document") else super().guess_type(path)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        self.asked.append(self.path)

    def log_message(self, format: str, *arguments: Any) -> None:
        return None


@contextmanager
def serving_shelf(directory: Path) -> Iterator[Shelf]:
    asked: list[str] = []
    with ThreadingHTTPServer((HOST, 0), partial(_Handler, asked, directory=str(directory))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Shelf(directory, server.server_port, asked)
        server.shutdown()
