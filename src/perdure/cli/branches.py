"""Branches: go back to a snapshot, take over what a branch became, free one, and see what came from what."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, ago, dump, markup, say, size, table, wants_json
from perdure.cli.workspaces import Name, find, state_text, woke
from perdure.wire import public

Branch = Annotated[str, typer.Argument(metavar="BRANCH", help="The branch's name or id.", show_default=False)]


def rewind(
    ctx: typer.Context,
    name: Name,
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Its id or name: see 'perdure snapshot ls'.")],
    json: JsonFlag = False,
) -> None:
    """Go back to a snapshot; what the workspace was until now is kept as a branch."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    report = workspace.rewind(snapshot)
    if as_json:
        dump({"workspace": workspace.info, "report": report})
    else:
        say(f"[bold]{markup(workspace.name)}[/] is awake: {woke(report)}")


def promote(ctx: typer.Context, branch: Branch, json: JsonFlag = False) -> None:
    """Let the workspace that a branch was forked from go on with the branch's state."""
    as_json = wants_json(ctx, json)
    workspace = find(branch).promote()
    assert workspace.report is not None, "promote answers with a report"
    if as_json:
        dump({"workspace": workspace.info, "report": workspace.report})
    else:
        say(f"[bold]{markup(workspace.name)}[/] goes on as {markup(branch)} was: {woke(workspace.report)}")


def discard(
    ctx: typer.Context,
    branches: Annotated[list[str], typer.Argument(metavar="BRANCH...", help="Names or ids.", show_default=False)],
    json: JsonFlag = False,
) -> None:
    """Free branches that are not needed any more, with what only they hold. This cannot be undone."""
    as_json = wants_json(ctx, json)
    found = [find(name) for name in branches]  # all must exist before any is discarded
    for one in found:
        one.discard()
        if not as_json:
            say(f"{markup(one.name)} is discarded; its thread stays: perdure log {one.info.id}")
    if as_json:
        dump({"discarded": [one.info.id for one in found]})


def branch_ls(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """Show the tree that a workspace belongs to: what was forked from what, when, its state and sizes."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    nodes = workspace.tree()
    if as_json:
        dump({"nodes": nodes})
        return
    rows = [
        (
            f"{lead}[bold]{markup(node.workspace.name)}[/]{' ←' if node.workspace.id == workspace.info.id else ''}",
            node.workspace.kind.value,
            state_text(node.workspace),
            _forked(node),
            size(node.own_bytes),
            size(node.total_bytes),
        )
        for lead, node in zip(leads([node.depth for node in nodes]), nodes, strict=True)
    ]
    table(("NAME", "KIND", "STATE", "FORKED", "OWN", "TOTAL"), rows, right=("OWN", "TOTAL"))


def _forked(node: public.TreeNode) -> str:
    """At which snapshot, and when that was."""
    if node.workspace.forked_from is None:
        return "-"
    at = node.forked_name or node.workspace.forked_from
    return markup(at) + (f", {ago(node.forked_at)}" if node.forked_at else "")


def leads(depths: list[int]) -> list[str]:
    """What is drawn before each row of a tree whose rows stand in the order of a walk."""
    drawn = []
    for index, depth in enumerate(depths):
        text = ""
        for level in range(1, depth + 1):
            later = next((one for one in depths[index + 1 :] if one <= level), 0)
            goes_on = later == level
            if level == depth:
                text += "├─ " if goes_on else "└─ "
            else:
                text += "│  " if goes_on else "   "
        drawn.append(text)
    return drawn
