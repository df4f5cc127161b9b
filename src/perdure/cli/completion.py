"""``perdure completion SHELL``, and what its scripts ask at each TAB: ``perdure __complete WORDS…``, the last one unfinished.

An answer is one candidate per line, with a tab and a few words about it; without any the shell offers its files. Commands and
their options are known here; names of workspaces and the like come from the server, which has a second: what it does not say in
that time, or not at all, is left out without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from perdure.cli.arguments import PLURALS
from perdure.cli.commands import COMMANDS, GROUPS, Entry, Later
from perdure.cli.output import JsonFlag, dump, safe, wants_json

PATIENCE_S = 1.0
SHOWN_MAX = 200
_ROOT_OPTIONS = ("--json", "--version", "--help")

BASH = """\
# perdure completion bash: in ~/.bashrc, source <(perdure completion bash)
_perdure() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\\t'*}")
    done < <(perdure __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -o bashdefault -F _perdure perdure
"""
ZSH = """\
#compdef perdure
# perdure completion zsh: in ~/.zshrc after compinit, source <(perdure completion zsh)
_perdure() {
    local line
    local -a found
    for line in "${(@f)$(perdure __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
    done
    if (( $#found )); then
        _describe perdure found
    else
        _files
    fi
}
compdef _perdure perdure
"""
FISH = """\
# perdure completion fish: perdure completion fish > ~/.config/fish/completions/perdure.fish
function __perdure_complete
    set -l words (commandline -opc) (commandline -ct)
    perdure __complete $words[2..] 2>/dev/null
end
complete -c perdure -f -a '(__perdure_complete)'
complete -c perdure -n 'test -z "$(__perdure_complete)"' -F
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(
    ctx: typer.Context,
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)
    ],
    json: JsonFlag = False,
) -> None:
    """Print a script that completes commands, options and names of workspaces in a shell. Its first line says where it goes."""
    if wants_json(ctx, json):
        dump({"shell": shell, "script": SCRIPTS[shell]})
    else:
        sys.stdout.write(SCRIPTS[shell])


@dataclass(frozen=True, slots=True)
class Candidate:
    value: str
    about: str = ""


#: Given what is asked for (see ``_KINDS``), the words of the command's arguments so far, and how it begins.
Ask = Callable[[str, Sequence[str], str], Iterable[Candidate]]


@dataclass(slots=True)
class _Line:
    """A command line without its last word, taken apart."""

    entries: Iterable[Entry] = COMMANDS  # those that may come next, while there is no command yet
    group: str | None = None
    command: Any = None
    arguments: list[str] = field(default_factory=list)
    wants_value: Any = None  # the option whose value comes next
    is_foreign: bool = False  # behind --: not ours


def answer(words: Sequence[str]) -> int:
    """Print what the last word may become. Whatever goes wrong, a shell that asks for help is not told about it."""
    from perdure.core.errors import PerdureError

    try:
        found = [*islice(complete(list(words) or [""], _from_server), SHOWN_MAX)]
    except PerdureError:
        return 0
    sys.stdout.write("".join(f"{safe(one.value)}\t{safe(one.about)}\n" for one in found))
    return 0


def complete(words: Sequence[str], ask: Ask) -> Iterator[Candidate]:
    """What the last word may become."""
    *before, last = words
    line = _read(before)
    if line.is_foreign:
        return
    for one in _possible(line, last, ask):
        if one.value.startswith(last):
            yield one


def _possible(line: _Line, last: str, ask: Ask) -> Iterator[Candidate]:
    if line.wants_value is not None:
        yield from _values(line.wants_value, line, last, ask)
    elif last.startswith("-"):
        yield from _options(line.command)
    elif line.command is None:
        yield from (Candidate(entry.name, entry.summary) for entry in line.entries if not entry.hidden)
        if line.group is None:
            yield from (Candidate(name, about) for name, about, _ in GROUPS)
    elif (parameter := _argument(line)) is not None:
        yield from _values(parameter, line, last, ask)


def _read(words: Sequence[str]) -> _Line:
    line = _Line()
    for word in words:
        if line.wants_value is not None:
            line.wants_value = None
        elif word == "--":
            line.is_foreign = True
        elif word.startswith("-") and word != "-":
            line.wants_value = _valued(line.command, word)
        elif line.command is not None:
            line.arguments.append(word)
        else:
            _descend(line, PLURALS.get(word, word))
    if line.command is not None and line.command.name == "exec" and len(line.arguments) > 1:
        line.is_foreign = True  # the words of the command that runs inside
    return line


def _descend(line: _Line, word: str) -> None:
    for name, _, entries in GROUPS if line.group is None else ():
        if name == word:
            line.group, line.entries = name, entries
            return
    found = next((entry for entry in line.entries if entry.name == word), None)
    if found is None:
        line.is_foreign = True
    else:
        line.command = Later(found).load()


def _valued(command: Any, word: str) -> Any:
    """The option that a word names, if its value is the next word."""
    for option in _of(command, "option"):
        if word in option.opts and not option.is_flag:
            return option
    return None


def _of(command: Any, kind: str) -> list[Any]:
    return [one for one in command.params if one.param_type_name == kind and not one.hidden] if command is not None else []


def _options(command: Any) -> Iterator[Candidate]:
    if command is None:
        yield from map(Candidate, _ROOT_OPTIONS)
        return
    for option in _of(command, "option"):
        long = [name for name in option.opts if name.startswith("--")]
        yield from (Candidate(name, option.help or "") for name in long or option.opts)
    yield Candidate("--help", "Show what the command does.")


def _argument(line: _Line) -> Any:
    """The argument that comes next; the last one again if it takes many."""
    wanted = _of(line.command, "argument")
    if len(line.arguments) < len(wanted):
        return wanted[len(line.arguments)]
    return wanted[-1] if wanted and wanted[-1].nargs == -1 else None


#: What an argument or an option's value names, by how the help calls it. A command that makes the thing is left out below.
_KINDS = {
    **{"NAME": "workspaces", "SNAPSHOT": "snapshots", "IMAGE": "images", "KEY": "keys", "TENANT": "tenants"},
    **{"EXECUTION": "executions", "CALLBACK": "callbacks", "FUNCTION": "functions"},
}
_MAKES = "create"


def _values(parameter: Any, line: _Line, last: str, ask: Ask) -> Iterable[Candidate]:
    if choices := _choices(parameter.type_descriptor.annotation):
        return map(Candidate, choices)
    called = (parameter.metavar or (parameter.name or "").upper()).strip("[]").removesuffix("...")
    kind = _KINDS.get(called)
    if kind is None or (kind == "workspaces" and line.command.name == _MAKES):
        return ()
    return ask(kind, line.arguments, last)


def _choices(annotation: Any) -> list[str]:
    """Of an enum or of literals, in a list or optional too."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(one.value) for one in annotation]
    if get_origin(annotation) is Literal:
        return [str(one) for one in get_args(annotation)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _from_server(kind: str, arguments: Sequence[str], begin: str) -> Iterator[Candidate]:
    from perdure.sdk import Client, Workspace

    with Client(timeout_s=PATIENCE_S) as client:
        if kind == "workspaces":
            for one in Workspace.iterate(client=client, limit=SHOWN_MAX, name_prefix=begin):
                yield Candidate(one.name, one.info.state.value)
        elif kind == "snapshots" and arguments:
            for snapshot in Workspace.connect(arguments[0], wake=False, client=client).snapshots():
                yield Candidate(snapshot.name or snapshot.id, snapshot.reason)
        elif kind == "images":
            yield from (Candidate(one.name) for one in client.images() if one.current)
        elif kind == "keys":
            found = client.keys()
            yield from (Candidate(one.name, one.state.value) for one in found)
        elif kind == "tenants":
            yield from (Candidate(one.name) for one in client.tenants())
        elif kind in {"executions", "callbacks", "functions"}:
            yield from _of_durable(client, kind)


def _of_durable(client: Any, kind: str) -> Iterator[Candidate]:
    if kind == "executions":
        for one in islice(client.executions.list(), SHOWN_MAX):
            yield Candidate(one.name, f"{one.function} {one.status.value}")
    elif kind == "callbacks":
        yield from (Candidate(one.callback_id, f"{one.function} {one.name or ''}".strip()) for one in client.callbacks.list())
    else:
        yield from (Candidate(one.name) for one in client.executions.functions())
