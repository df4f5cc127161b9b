"""Recipes: small TOML files that say what an image holds. Parsing is strict; every mistake is one sentence.

A recipe, complete::

    name = "base"
    packages = ["git", "curl"]                  # Debian packages besides the minimal system
    commands = ["useradd -m agent"]             # /bin/sh lines run as root in the new system, in this order
    environment = { LANG = "C.UTF-8" }          # of every command in a workspace
    memory_mib = 512
    min_memory_mib = 256                        # with less a workspace is refused; default: what the guest itself needs
    vcpus = 1
    disk_gib = 8
    egress_allow = ["packages.example.org:443"] # HOST:PORT that every workspace of this image may reach
    warm_up = ["git --version"]                 # run before the golden snapshot, so that they start fast

    [files."/etc/motd"]
    content = "hello\\n"                         # or source = "file beside the recipe"
    mode = 0o644

    [program]                                   # started at boot and kept running, see docs/guides/agent-programs.md
    argv = ["python3", "/srv/agent.py"]
    env = { MODE = "production" }
    cwd = "/srv"
    user = "agent"                              # default root
    port = 8080                                 # where it answers invocations
    restart = "always"                          # or "on-failure", "never"
    stop_grace_s = 10                           # from SIGTERM to SIGKILL

With ``extends = "base"`` a recipe begins as that shipped one: lists are appended to, tables are merged, numbers are replaced.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files as package_files
from pathlib import Path, PurePosixPath
from typing import Any

from perdure.core.errors import InvalidRequest, NotFound
from perdure.wire.guest.ops import PROGRAM_FILE
from perdure.wire.node import PROGRAM_PORT, PROGRAM_STOP_GRACE_S, MachineSize, ProgramSpec, Restart

#: Below this the kernel and the agent leave too little for programs: of 128 MiB a guest has 86, of 96 it has 54 (both boot).
MIN_MEMORY_MIB = 128
MAX_MEMORY_MIB = 1 << 20
MAX_VCPUS = 64
MIN_DISK_GIB = 1
MAX_DISK_GIB = 16384

_NAME = re.compile(r"^[a-z0-9]([a-z0-9._-]{0,48}[a-z0-9])?$")
_PACKAGE = re.compile(r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?$")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_EGRESS = re.compile(r"^(\[[0-9a-fA-F:.]+(/\d{1,3})?\]|[A-Za-z0-9*][A-Za-z0-9.*_/-]*):\d{1,5}$")


#: Raised when the way a root disk is made changes, so that older ones are not taken for current.
ROOT_LAYOUT = 2


def is_image_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A file that the build puts into the root disk, owned by root."""

    path: str  # absolute, in the image
    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image holds and how large its workspaces are by default."""

    name: str
    packages: tuple[str, ...] = ()
    files: tuple[RecipeFile, ...] = ()
    commands: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_mib: int = 512
    min_memory_mib: int = MIN_MEMORY_MIB
    vcpus: int = 1
    disk_gib: int = 8
    egress_allow: tuple[str, ...] = ()
    warm_up: tuple[str, ...] = ()

    @property
    def size(self) -> MachineSize:
        return MachineSize(self.memory_mib, self.vcpus)

    @property
    def digest(self) -> str:
        """SHA-256 of the meaning: the name, comments and the order of tables do not count."""
        return _digest(self._root_part() | self._other_part())

    @property
    def root_digest(self) -> str:
        """SHA-256 of the part that decides the root disk's content."""
        return _digest(self._root_part())

    def _root_part(self) -> dict[str, Any]:
        entries = [[f.path, f.mode, hashlib.sha256(f.content).hexdigest()] for f in self.files]
        decides = {"packages": sorted(self.packages), "files": entries, "commands": list(self.commands), "disk": self.disk_gib}
        return {"layout": ROOT_LAYOUT, **decides}

    def _other_part(self) -> dict[str, Any]:
        part = {
            "environment": dict(self.environment),
            "memory": self.memory_mib,
            "vcpus": self.vcpus,
            "egress": list(self.egress_allow),
            "warm_up": list(self.warm_up),
        }
        if self.min_memory_mib != MIN_MEMORY_MIB:  # a recipe without it keeps the digest that it had before there was this key
            part["min_memory"] = self.min_memory_mib
        return part


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_size(size: MachineSize) -> MachineSize:
    """Return a size that can boot, or raise InvalidRequest with the bound it breaks."""
    _bounded("memory_mib", size.memory_mib, MIN_MEMORY_MIB, MAX_MEMORY_MIB, "the guest's kernel and agent need that much")
    _bounded("vcpus", size.vcpus, 1, MAX_VCPUS, "a machine needs at least one")
    return size


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with Perdure."""
    folder = package_files("perdure.images") / "assets" / "recipes"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_recipe(reference: str) -> Recipe:
    """A shipped recipe by its name, or a TOML file by its path (anything with a slash or ending in .toml).

    Raises NotFound when there is no such recipe, InvalidRequest when it says something wrong.
    """
    if "/" not in reference and not reference.endswith(".toml"):
        source = package_files("perdure.images") / "assets" / "recipes" / f"{reference}.toml"
        if not source.is_file():
            raise NotFound(
                f"There is no recipe named {reference!r}; Perdure ships {', '.join(shipped_recipes())}.",
                hint="Name one of these, or give the path of a recipe file ending in .toml.",
            )
        return parse_recipe(source.read_bytes(), where=f"{reference}.toml", beside=None)
    path = Path(reference)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NotFound(f"The recipe file {reference} cannot be read: {error.strerror}.", hint="Check the path.") from error
    return parse_recipe(text, where=reference, beside=path.parent)


def parse_recipe(text: bytes, *, where: str, beside: Path | None, sources: Mapping[str, bytes] | None = None) -> Recipe:
    """Parse a recipe. ``where`` names it in errors.

    What a file's ``source`` names is taken from ``sources``, or else read from the directory ``beside``.
    """
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where} is not TOML: {error}.", hint="Correct that line.") from error
    reader = _Reader(where, table, _Sources(beside, sources or {}))
    base = reader.extended()
    memory_mib = reader.number("memory_mib", base.memory_mib, MIN_MEMORY_MIB, MAX_MEMORY_MIB)
    recipe = Recipe(
        name=reader.name(),
        packages=reader.strings("packages", _PACKAGE, "a Debian package name"),
        files=(*reader.files(), *reader.program()),
        commands=reader.strings("commands", None, "a command"),
        environment=reader.environment(),
        memory_mib=memory_mib,
        min_memory_mib=reader.least(base.min_memory_mib, memory_mib),
        vcpus=reader.number("vcpus", base.vcpus, 1, MAX_VCPUS),
        disk_gib=reader.number("disk_gib", base.disk_gib, MIN_DISK_GIB, MAX_DISK_GIB),
        egress_allow=reader.strings("egress_allow", _EGRESS, "HOST:PORT"),
        warm_up=reader.strings("warm_up", None, "a command"),
    )
    reader.nothing_left()
    return _extended(base, recipe)


def _extended(base: Recipe, own: Recipe) -> Recipe:
    """``own`` after everything that ``base`` says; its numbers have taken base's defaults already."""
    return replace(
        own,
        packages=tuple(dict.fromkeys([*base.packages, *own.packages])),
        files=tuple(sorted({file.path: file for file in (*base.files, *own.files)}.values(), key=lambda file: file.path)),
        commands=(*base.commands, *own.commands),
        environment={**base.environment, **own.environment},
        egress_allow=tuple(dict.fromkeys([*base.egress_allow, *own.egress_allow])),
        warm_up=(*base.warm_up, *own.warm_up),
    )


def _bounded(key: str, value: int, low: int, high: int, why: str, where: str = "") -> None:
    if not low <= value <= high:
        raise InvalidRequest(
            f"{where}{key} is {value}, but must be between {low} and {high}: {why}.", hint=f"Choose {low} to {high}."
        )


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where the files that a recipe names come from: sent along with it, or beside it on this host."""

    beside: Path | None
    sent: Mapping[str, bytes]

    def read(self, name: str) -> bytes | None:
        """None where there is no directory to look in. Raises OSError."""
        if name in self.sent:
            return self.sent[name]
        return None if self.beside is None else (self.beside / name).read_bytes()


class _Reader:
    """Takes keys out of a table one by one, so that what is left over is a mistake."""

    def __init__(self, where: str, table: dict[str, Any], sources: _Sources) -> None:
        self._where = where
        self._left = dict(table)
        self._known: list[str] = []
        self._sources = sources

    def _take(self, key: str) -> Any:
        self._known.append(key)
        return self._left.pop(key, None)

    def _wrong(self, sentence: str, hint: str) -> InvalidRequest:
        return InvalidRequest(f"{self._where}: {sentence}", hint=hint)

    def extended(self) -> Recipe:
        """The shipped recipe that this one begins as; an empty one if it names none."""
        value = self._take("extends")
        if value is None:
            return Recipe("")
        if value not in shipped_recipes():
            raise self._wrong(f"extends is {value!r}, which is no shipped recipe.", f"There is: {', '.join(shipped_recipes())}.")
        return load_recipe(value)

    def name(self) -> str:
        value = self._take("name")
        if not isinstance(value, str) or not is_image_name(value):
            raise self._wrong(
                f"name is {value!r}, which cannot name an image.",
                "Set name to 1 to 50 lower-case letters, digits, dots and dashes.",
            )
        return value

    def strings(self, key: str, pattern: re.Pattern[str] | None, what: str) -> tuple[str, ...]:
        value = self._take(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self._wrong(f"{key} is not a list.", f'Write {key} = ["…", "…"].')
        for entry in value:
            if not isinstance(entry, str) or not entry.strip() or "\0" in entry or (pattern and not pattern.match(entry)):
                raise self._wrong(f"{entry!r} in {key} is not {what}.", "Correct or remove that entry.")
        return tuple(value)

    def number(self, key: str, default: int, low: int, high: int) -> int:
        value = self._take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(f"{key} is {value!r}, not a whole number.", f"Choose {low} to {high}.")
        _bounded(key, value, low, high, "no machine can be made outside that range", f"{self._where}: ")
        return value

    def least(self, default: int, memory_mib: int) -> int:
        """The least memory that a workspace may ask for: no more than it gets by itself."""
        value = self.number("min_memory_mib", default, MIN_MEMORY_MIB, MAX_MEMORY_MIB)
        if value > memory_mib:
            raise self._wrong(
                f"min_memory_mib is {value}, which is more than memory_mib, {memory_mib}.", "Set memory_mib to that or more."
            )
        return value

    def environment(self) -> dict[str, str]:
        return self._variables("environment")

    def _variables(self, key: str) -> dict[str, str]:
        value = self._take(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(f"{key} is not a table.", f'Write {key} = {{ NAME = "value" }}.')
        for name, content in value.items():
            if not _VARIABLE.match(name) or not isinstance(content, str) or "\0" in content:
                raise self._wrong(
                    f"{key} has {name} = {content!r}, which is no variable with a text value.", 'Write NAME = "value".'
                )
        return dict(value)

    def files(self) -> tuple[RecipeFile, ...]:
        value = self._take("files")
        if isinstance(value, dict) and PROGRAM_FILE in value and "program" in self._left:
            raise self._wrong(f"program and the file {PROGRAM_FILE} name the same thing.", "Give one of the two.")
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise self._wrong("files is not a table.", 'Write [files."/path/in/the/image"] and below it content = "…".')
        return tuple(self._file(path, entry) for path, entry in sorted(value.items()))

    def _file(self, path: str, entry: Any) -> RecipeFile:
        pure = PurePosixPath(path)
        if not pure.is_absolute() or ".." in pure.parts or path.endswith("/") or "\0" in path or str(pure) != path:
            raise self._wrong(f"the file path {path!r} is not a plain absolute path.", 'Write it like "/etc/motd".')
        if not isinstance(entry, dict) or ("content" in entry) == ("source" in entry):
            raise self._wrong(f"the file {path} needs exactly one of content and source.", "Give one of the two.")
        unknown = set(entry) - {"content", "source", "mode"}
        if unknown:
            raise self._wrong(f"the file {path} has an unknown key {min(unknown)!r}.", "The keys are content, source and mode.")
        mode = entry.get("mode", 0o644)
        if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
            raise self._wrong(f"the file {path} has the mode {mode!r}.", "Write an octal number such as 0o755.")
        return RecipeFile(path, self._content(path, entry), mode)

    def _content(self, path: str, entry: dict[str, Any]) -> bytes:
        for key in ("content", "source"):
            if key in entry and not isinstance(entry[key], str):
                raise self._wrong(f"the {key} of the file {path} is not text.", f'Write {key} = "…".')
        if "content" in entry:
            return str(entry["content"]).encode()
        try:
            content = self._sources.read(entry["source"])
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = error.strerror if isinstance(error, OSError) else "that is no file name"
            raise self._wrong(
                f"the source {entry['source']!r} of the file {path} cannot be read: {reason}.",
                "Paths are relative to the recipe file.",
            ) from error
        if content is None:
            raise self._wrong(
                f"the file {path} has the source {entry['source']!r}, which did not come with the recipe.",
                "Send it along (perdure image build does), or use content.",
            )
        return content

    def program(self) -> tuple[RecipeFile, ...]:
        """The file that names the program: part of the root disk like any other, and so of the digest."""
        value = self._take("program")
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise self._wrong("program is not a table.", 'Write [program] and below it argv = ["…"].')
        inner = _Reader(f"{self._where}: program", value, self._sources)
        argv = inner.strings("argv", None, "a word of a command")
        spec = ProgramSpec(
            argv=argv,
            env=inner._variables("env"),
            cwd=inner._word("cwd"),
            user=inner._word("user"),
            port=inner.number("port", PROGRAM_PORT, 1, 65535),
            restart=inner._restart(),
            stop_grace_s=inner._seconds("stop_grace_s", PROGRAM_STOP_GRACE_S),
        )
        inner.nothing_left()
        try:
            return (RecipeFile(PROGRAM_FILE, spec.to_file()),)
        except InvalidRequest as error:
            raise self._wrong(f"program: {error.message}", error.hint) from error

    def _word(self, key: str) -> str | None:
        value = self._take(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self._wrong(f"{key} is {value!r}, which is no text.", f'Write {key} = "…".')
        return value

    def _restart(self) -> Restart:
        value = self._take("restart")
        if value is not None and value not in list(Restart):
            raise self._wrong(f"restart is {value!r}.", f"It is one of {', '.join(Restart)}.")
        return Restart.ALWAYS if value is None else Restart(value)

    def _seconds(self, key: str, default: float) -> float:
        value = self._take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(f"{key} is {value!r}, not a number of seconds.", f"Write {key} = {default:g}.")
        return float(value)

    def nothing_left(self) -> None:
        if self._left:
            raise self._wrong(f"{min(self._left)!r} is not a key of a recipe.", f"The keys are {', '.join(self._known)}.")
