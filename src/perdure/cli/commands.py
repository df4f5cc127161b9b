"""All commands by name, with what ``perdure --help`` says of each. What one does is imported when it is called.

Importing all of them takes longer than most of them take: models, HTTP client and tables, to print a list of names. So each is a
``Later`` until its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from itertools import dropwhile
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Entry(NamedTuple):
    """``place`` is ``module:function`` below ``perdure.cli``; ``summary`` is the first paragraph of its docstring."""

    name: str
    place: str
    summary: str
    hidden: bool = False


COMMANDS = (
    Entry(
        "up",
        "server:up",
        "Start the server: API, node and database in one process. Ctrl-C hibernates every workspace and stops it.",
    ),
    Entry(
        "down",
        "server:down",
        "Stop the server of this machine: every workspace is hibernated first, however long that takes.",
    ),
    Entry("doctor", "server:doctor", "Say what this host can do: QEMU, KVM, jail, cgroups, storage; and what mends the rest."),
    Entry("demo", "server:demo", "Show the whole story in about a minute, in a temporary home that is removed afterwards."),
    Entry("bench", "server:bench", "Measure, beside a baseline taken in the same run."),
    Entry("create", "workspaces:create", "Make a workspace. It is awake when the command returns."),
    Entry("ls", "workspaces:ls", "List workspaces."),
    Entry("show", "workspaces:show", "Show one workspace and what its last wake kept."),
    Entry("sleep", "workspaces:sleep", "Hibernate a workspace now."),
    Entry("wake", "workspaces:wake", "Wake a workspace and say what was kept; or, with --at, have it wake by itself."),
    Entry("checkpoint", "workspaces:checkpoint", "Record a workspace while it runs."),
    Entry("fork", "workspaces:fork", "Make new workspaces that continue where this one is."),
    Entry("log", "workspaces:log", "Show a workspace's thread: what happened to it, in order."),
    Entry("events", "events:events", "Show what happens to all workspaces, in one order. With --json: one event per line."),
    Entry(
        "usage", "usage:usage", "Say how long workspaces were awake and asleep, and what they used. Deleted ones are included."
    ),
    Entry(
        "top",
        "top:top",
        "Watch workspaces: what is awake and why, memory, processor time, idle time and bytes moved. q or Ctrl-C ends it.",
    ),
    Entry("audit", "audit:audit", "Say who did what, and what was refused to whom: the last day, oldest first."),
    Entry("resize", "workspaces:resize", "Grow a workspace's disk; takes effect at its next disk boot."),
    Entry(
        "recover",
        "workspaces:recover",
        "Bring a failed workspace back; or, with --from-store, make the catalogue of a home that has lost its database.",
    ),
    Entry("rm", "workspaces:rm", "Delete workspaces with all their snapshots; their branches stay. This cannot be undone."),
    Entry("keep-awake", "workspaces:keep_awake", "Do not let a workspace sleep for idleness for a while."),
    Entry(
        "configure",
        "lineage:configure",
        "Change a workspace's timers, how many snapshots it keeps, and what becomes of it after a long sleep. Does not wake it.",
    ),
    Entry("rewind", "branches:rewind", "Go back to a snapshot; what the workspace was until now is kept as a branch."),
    Entry(
        "tree",
        "branches:branch_ls",
        "Show the tree that a workspace belongs to: what was forked from what, when, its state and sizes.",
        hidden=True,
    ),
    Entry(
        "exec",
        "execs:run",
        "Run a command in a workspace; ends with the command's exit code, or 125 if Perdure failed.",
    ),
    Entry(
        "python",
        "python:run",
        "Run Python in a workspace, in a kernel whose variables stay. Ends with 1 if the code failed, or 125 if Perdure failed.",
    ),
    Entry(
        "completion",
        "completion:completion",
        "Print a script that completes commands, options and names of workspaces in a shell. Its first line says where it goes.",
    ),
    Entry(
        "invoke",
        "programs:invoke",
        "Call a workspace's program and print its answer; wakes the workspace. Ends with 2 if the program answers with an error.",
    ),
    Entry(
        "logs",
        "programs:logs",
        "Print what a workspace's program wrote, stdout and stderr in their order. With --json: one line per piece.",
    ),
    Entry(
        "shell",
        "shell:shell",
        "Open a shell in a workspace; ends with the shell's exit code, or 0 when it is left running by the detach keys.",
    ),
    Entry("ps", "running:ps", "List the commands and terminals that run in a workspace. Wakes it."),
    Entry(
        "kill",
        "running:kill",
        "End a command or terminal and everything it started; or, with --signal, only send it a signal.",
    ),
    Entry(
        "worker",
        "worker:worker",
        "Serve durable functions: take their invocations from the server, and run them in warm processes.",
    ),
    Entry("cp", "copy:cp", "Copy a file or a whole directory into a workspace or out of it."),
    Entry("watch", "watch:watch", "Say what changes in a directory of a workspace, as it happens, until Ctrl-C."),
    Entry(
        "forward",
        "forward:forward",
        "Open local ports that lead to ports in a workspace, until Ctrl-C. A connection wakes it.",
    ),
    Entry(
        "share",
        "share:share",
        "Make a link that lets whoever has it reach a port of a workspace; without PORT: list what is shared.",
    ),
    Entry("unshare", "share:unshare", "Take back every link of a port of a workspace, and that it is public; or one link."),
    Entry(
        "replay",
        "replay:replay",
        "Run a handler of here against an execution's history, and say whether it fits. Exits 1 when it does not.",
    ),
    Entry(
        "verify",
        "histories:verify",
        "Check every recorded history, hash by hash: threads of workspaces, and executions. Exits 1 when one was changed.",
    ),
    Entry(
        "backup",
        "backup:backup",
        "Back up everything: database, snapshots and the images they lie on. The server goes on working.",
    ),
    Entry(
        "restore",
        "backup:restore",
        "Bring a backup back into an empty home (PERDURE_HOME). No server may run there; start it afterwards with 'perdure up'.",
    ),
)
SNAPSHOT = (
    Entry("ls", "lineage:ls", "Show the tree of a workspace's snapshots, oldest first."),
    Entry("name", "lineage:name_it", "Give a snapshot a name: it is kept for as long as it has one."),
    Entry(
        "push",
        "lineage:push",
        "Wait until the object store has a snapshot. It is uploaded at once; all are uploaded by themselves sooner or later.",
    ),
    Entry(
        "rm",
        "lineage:rm",
        "Remove snapshots. One that a workspace wakes from or was forked from is refused. This cannot be undone.",
    ),
    Entry(
        "verify",
        "verify:verify",
        "Check every stored byte of snapshots and of the images below them. Wakes nothing; exits 1 when something is damaged.",
    ),
)
BRANCH = (
    Entry(
        "ls",
        "branches:branch_ls",
        "Show the tree that a workspace belongs to: what was forked from what, when, its state and sizes.",
    ),
    Entry(
        "promote",
        "branches:promote",
        "Let the workspace that a branch was forked from go on with the branch's state.",
    ),
    Entry(
        "discard",
        "branches:discard",
        "Free branches that are not needed any more, with what only they hold. This cannot be undone.",
    ),
)
IMAGE = (
    Entry(
        "build",
        "images:build",
        "Build an image. With --json: one line per step, the last one with the image.",
    ),
    Entry("ls", "images:ls", "List images, and the recipes that are not built yet."),
    Entry("rm", "images:rm", "Remove an image that no workspace uses."),
    Entry(
        "prune",
        "images:prune",
        "Remove old images: those that no name points to any more and no workspace of this server uses.",
    ),
)
PROGRAM = (
    Entry("show", "programs:show", "Show a workspace's program and how it does. Wakes the workspace."),
    Entry(
        "set",
        "programs:set_it",
        "Name the program that a workspace keeps running, and start it. Sleeps, forks and boots from disk keep it.",
    ),
    Entry("unset", "programs:unset", "End a workspace's program and forget it."),
    Entry("start", "programs:start", "Start a workspace's program, now if it backs off."),
    Entry(
        "stop",
        "programs:stop",
        "Stop a workspace's program until it is started again or its machine boots from disk.",
    ),
    Entry(
        "restart",
        "programs:restart",
        "End a workspace's program and start it anew, as the file that names it is now.",
    ),
)
KEY = (
    Entry("create", "keys:create", "Make an API key and print its secret, this once."),
    Entry("aws", "keys:aws", "Print what AWS's clients are configured with, as lines for a shell."),
    Entry("ls", "keys:ls", "List API keys. Revoked and expired ones with --all."),
    Entry("revoke", "keys:revoke", "Revoke API keys. What begins after that is refused; this cannot be undone."),
)
TENANT = (
    Entry("create", "tenants:create", "Make a tenant."),
    Entry("ls", "tenants:ls", "List tenants."),
    Entry("show", "tenants:show", "Show what a tenant may have, and has. Without a name: your own."),
    Entry("quota", "tenants:quota", "Limit what a tenant may have. What it has above a new limit it keeps."),
    Entry(
        "shred",
        "tenants:shred",
        "Throw away the key of a tenant: nothing that it has in the encrypted object store can ever be read again.",
    ),
)
WEBHOOK = (
    Entry("create", "events:create", "Send events to a URL from now on, and print the secret that signs them, this once."),
    Entry("ls", "events:ls", "List webhooks, with what is still to be delivered."),
    Entry("show", "events:show", "Show what is still to be delivered to a webhook, and what was given up."),
    Entry(
        "redeliver",
        "events:redeliver",
        "Send events that were given up once more, for another day: those of these numbers, or all.",
    ),
    Entry("rm", "events:rm", "Remove webhooks. What was still to be delivered to them is not any more."),
    Entry("test", "events:test", "Send a webhook an event of the kind 'test' now. Exits 1 when it was not delivered."),
)
EXECUTION = (
    Entry("ls", "executions:ls", "List executions, the newest first."),
    Entry("show", "executions:show", "Show an execution: what it waits for and since when, and its operations as a tree."),
    Entry("start", "executions:start", "Start an execution. It goes on without this command."),
    Entry(
        "wait",
        "executions:wait",
        "Wait for an execution's end and print its result. Fails with its error where it ends without one.",
    ),
    Entry("history", "executions:history", "Print an execution's events as AWS has them."),
    Entry("stop", "executions:stop", "End an execution now. What an invocation of it still does counts for nothing."),
    Entry(
        "pause",
        "executions:pause",
        "Have an execution invoked no more until it is resumed. Its timers and callbacks go on.",
    ),
    Entry("resume", "executions:resume", "Let a paused execution go on."),
    Entry(
        "retry",
        "executions:retry",
        "Resume a paused execution; of one that has ended, start another with the same function and input. Says which.",
    ),
    Entry("rm", "executions:rm", "Delete executions that have ended, with their histories. This cannot be undone."),
)
CALLBACK = (
    Entry("ls", "callbacks:ls", "List callbacks that are still open, the oldest first."),
    Entry("succeed", "callbacks:succeed", "Complete a callback with a result."),
    Entry("fail", "callbacks:fail", "Complete a callback with an error, which its function sees."),
    Entry("beat", "callbacks:beat", "Say that somebody still works on a callback: its heartbeat's timeout begins anew."),
)
FUNCTION = (Entry("ls", "functions:ls", "List functions, who serves them, and which of them have executions but no worker."),)
#: name, what it is about, its commands
GROUPS = (
    ("snapshot", "Snapshots of a workspace.", SNAPSHOT),
    ("branch", "Branches of a workspace.", BRANCH),
    ("image", "Images that workspaces start from.", IMAGE),
    ("program", "The program that a workspace keeps running.", PROGRAM),
    ("key", "API keys of a tenant.", KEY),
    ("webhook", "Where events are sent to.", WEBHOOK),
    ("execution", "Durable executions of functions.", EXECUTION),
    ("callback", "What durable executions wait for from outside.", CALLBACK),
    ("function", "Functions that workers serve.", FUNCTION),
    ("tenant", "Tenants of the server: nobody sees another one's workspaces.", TENANT),
)


class Noun(TyperGroup):
    """A word with commands below it. Alone it shows them, to people; to a program it says in JSON what is missing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.obj.json:
            args = [*dropwhile(lambda word: word == "--json", args)]
            if not args:
                ctx.fail("Missing command.")
        return super().parse_args(ctx, args)


class Later(TyperCommand):
    """A command of which only its name and summary are known until it is called."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.name, help=entry.summary, hidden=entry.hidden)
        self.entry = entry

    def load(self) -> TyperCommand:
        """The command itself."""
        module, _, function = self.entry.place.partition(":")
        app = typer.Typer(add_completion=False)
        app.command(self.entry.name)(getattr(import_module(f"perdure.cli.{module}"), function))
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand), "one function is one command"
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """From here on the command itself has the say. (The types of contexts are typer's own affair.)"""
        context = self.load().make_context(info_name, args, parent, **extra)
        context.call_on_close(_close_connections)
        return context


def _close_connections() -> None:
    from perdure.sdk._acompat import close_default_client

    close_default_client()


def fill(root: TyperGroup) -> None:
    """Add all commands."""
    _add(root, COMMANDS)
    for name, about, entries in GROUPS:
        group = Noun(name=name, help=about, no_args_is_help=True)
        _add(group, entries)
        root.add_command(group)


def _add(group: TyperGroup, entries: Iterable[Entry]) -> None:
    for entry in entries:
        group.add_command(Later(entry))
