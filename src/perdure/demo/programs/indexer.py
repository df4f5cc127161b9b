"""Runs inside the workspace: keeps every file of a checkout in memory, with an index of its words, and answers over HTTP.

    python3 indexer.py DIRECTORY PORT

GET /            what this process is: pid, a number it drew at its start, files, bytes, words, the digest of all it holds
GET /search?word=WORD   how many files have the word, and the first of them
GET /file?path=PATH     the file as memory has it
POST /refresh?path=PATH reads one file again
POST /note?text=TEXT    keeps a note, in memory only

Standard library only. Nothing is written to disk: what survives a sleep survived in memory.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import secrets
import sys
import urllib.parse
from pathlib import Path
from typing import Any

WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{2,40}")


class Index:
    """All files below a directory, and which words are in which."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.drawn = secrets.token_hex(8)
        self.notes: list[str] = []
        self.files: dict[str, bytes] = {}
        self.words: dict[bytes, set[str]] = {}
        for directory, names, files in os.walk(root):
            names[:] = [name for name in names if name != ".git"]
            for name in files:
                self.read(str((Path(directory) / name).relative_to(root)))

    def read(self, path: str) -> None:
        for word in WORD.findall(self.files.get(path, b"")):
            self.words.get(word, set()).discard(path)
        self.files[path] = (self.root / path).read_bytes()
        for word in set(WORD.findall(self.files[path])):
            self.words.setdefault(word, set()).add(path)

    def digest(self) -> str:
        total = hashlib.sha256()
        for path in sorted(self.files):
            total.update(path.encode("utf-8", "surrogateescape") + b"\0" + self.files[path])
        return total.hexdigest()

    def about(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "drawn": self.drawn,
            "files": len(self.files),
            "bytes": sum(map(len, self.files.values())),
            "words": len(self.words),
            "digest": self.digest(),
            "notes": self.notes,
        }

    def search(self, word: str) -> dict[str, Any]:
        found = sorted(self.words.get(word.encode(), ()))
        return {"word": word, "files": len(found), "first": found[:5]}


class Handler(http.server.BaseHTTPRequestHandler):
    index: Index

    def log_message(self, *_args: object) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path == "/":
            self.answer(json.dumps(self.index.about()).encode())
        elif url.path == "/search":
            self.answer(json.dumps(self.index.search(query.get("word", ""))).encode())
        elif url.path == "/file" and query.get("path") in self.index.files:
            self.answer(self.index.files[query["path"]])
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path == "/refresh" and query.get("path") in self.index.files:
            self.index.read(query["path"])
            self.answer(b"{}")
        elif url.path == "/note":
            self.index.notes.append(query.get("text", ""))
            self.answer(b"{}")
        else:
            self.send_error(404)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    Handler.index = Index(Path(sys.argv[1]))
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
