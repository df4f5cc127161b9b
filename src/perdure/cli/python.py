"""``perdure python``: run Python in a workspace, in a kernel whose variables stay."""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli import interrupts
from perdure.cli.execs import BROKEN_PIPE, OWN_FAILURE
from perdure.cli.output import JsonFlag, Status, dump, markup, note, say, size, swallow_stdout, wants_json
from perdure.cli.workspaces import Name, find, tell_losses
from perdure.core.errors import InvalidRequest
from perdure.sdk import PythonOutput, PythonResult, Workspace
from perdure.wire import public

#: The cell ended with an exception, had its time as ``timeout`` has it, or was interrupted.
CODES = {"ok": 0, "error": 1, "timeout": 124, "interrupted": 130}
_TEXTS = ("image/svg+xml",)


def run(
    ctx: typer.Context,
    name: Name,
    source: Annotated[
        str | None, typer.Argument(metavar="[CODE|FILE|-]", help="Code, a file with it, or - for stdin.", show_default=False)
    ] = None,
    *,
    context: Annotated[str, typer.Option(help="Which kernel; each name is one of its own.")] = public.DEFAULT_CONTEXT,
    timeout: Annotated[float | None, typer.Option(help="Seconds of running after which it is interrupted.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Save pictures and other files that it shows.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start the kernel anew first: its variables are lost.")] = False,
    interrupt: Annotated[bool, typer.Option("--interrupt", help="Interrupt what runs in the kernel, and do no more.")] = False,
    json: JsonFlag = False,
) -> Status:
    """Run Python in a workspace, in a kernel whose variables stay. Ends with 1 if the code failed, or 125 if Perdure failed.

    Prints what it writes, and the value of its last expression. Ctrl-C interrupts it, and so does a timeout, which ends with 124:
    the kernel lives on.
    """
    ctx.find_root().obj.failure_code = OWN_FAILURE
    as_json = wants_json(ctx, json)
    code = None if interrupt else _code(source, is_optional=restart)
    if interrupt and (source is not None or restart):
        raise InvalidRequest("--interrupt does nothing else.", hint="Leave out the code and --restart.")
    workspace = find(name)
    if interrupt:
        was_running = workspace.python.interrupt(context)
        dump({"interrupted": was_running}) if as_json else say("interrupted" if was_running else "Nothing ran.")
        return Status(0)
    if restart:
        kernel = workspace.python.restart(context)
        if code is None:
            dump(kernel) if as_json else say(f"kernel {kernel.kernel} of {markup(workspace.name)} is ready")
            return Status(0)
    assert code is not None
    return _run(workspace, code, {"context": context, "timeout_s": timeout}, save, as_json=as_json)


def _code(source: str | None, *, is_optional: bool) -> str | None:
    """What to run. A path of a file that exists is that file."""
    if source is None:
        if is_optional:
            return None
        raise InvalidRequest("There is no code to run.", hint="Write it after the name, or a file's path, or - for stdin.")
    if source == "-":
        content = sys.stdin.buffer.read()
    elif "\n" not in source and len(source) < 4096 and "\0" not in source and Path(source).is_file():
        content = Path(source).read_bytes()
    elif source.endswith(".py") and " " not in source and "\n" not in source:
        raise InvalidRequest(f"There is no file {source!r}.", hint="Check the path.")
    else:
        return source
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The code is not UTF-8: {error}.", hint="Save it as UTF-8.") from error


def _run(workspace: Workspace, code: str, options: dict[str, Any], save: Path | None, *, as_json: bool) -> Status:
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
    callbacks = {} if as_json else {"on_stdout": _writer(sys.stdout), "on_stderr": _writer(sys.stderr)}
    try:
        with interrupts.restored():
            result = workspace.python.run(code, **options, **callbacks)
    except KeyboardInterrupt:
        workspace.python.interrupt(options["context"])
        note(f"Interrupted: the variables of the kernel in {markup(workspace.name)} are kept.")
        return Status(CODES["interrupted"])
    except BrokenPipeError:  # the reader of our output left, as in `… | head`
        workspace.python.interrupt(options["context"])
        swallow_stdout()
        return Status(BROKEN_PIPE)
    saved = [[*_saved(one, save)] if save is not None else [] for one in result.results]
    if as_json:
        dump(document(result, saved))
    else:
        tell_losses(workspace)
        _tell(result, saved)
    return Status(CODES.get(result.status, 1))


def _writer(stream: Any) -> Any:
    def write(text: str) -> None:
        stream.buffer.write(text.encode("utf-8", "replace"))
        stream.buffer.flush()

    return write


def _tell(result: PythonResult, saved: list[list[Path]]) -> None:
    if result.restarted:
        note(f"[yellow]This is a new kernel, without earlier variables: {markup(result.reason)}[/]")
    for output, paths in zip(result.results, saved, strict=True):
        _show(output, paths)
    if result.error is not None:
        _writer(sys.stderr)(result.error.traceback.rstrip("\n") + "\n")
    if result.timed_out:
        note("[yellow]It had its time and was interrupted; the kernel's variables are kept.[/]")
    if result.truncated:
        note("[yellow]It said more than is kept of one cell.[/]")


def _show(output: PythonOutput, paths: list[Path]) -> None:
    for path in paths:
        say(f"saved {markup(path)}")
    if not paths:
        if output.text is not None:
            _writer(sys.stdout)(output.text + "\n")
        for mime, content in _files(output):
            note(f"[dim]{markup(mime)}, {size(len(content))}: save it with --save DIR[/]")
    for mime in output.omitted:
        note(f"[yellow]{markup(mime)} was too large to be sent[/]")


def _files(output: PythonOutput) -> Iterator[tuple[str, bytes]]:
    """What of it is a file of its own, by MIME type."""
    for mime in output.data:
        if mime in _TEXTS:
            yield mime, str(output.data[mime]).encode()
        elif mime.startswith(("image/", "audio/", "video/")) or mime == "application/pdf":
            content = output.bytes_of(mime)
            if content is not None:
                yield mime, content


def _saved(output: PythonOutput, directory: Path) -> Iterator[Path]:
    """Saved under the first free number: a call never replaces what an earlier one saved."""
    for mime, content in _files(output):
        ending = mimetypes.guess_extension(mime) or ".bin"
        for number in range(1, 1_000_000):
            path = directory / f"output-{number}{ending}"
            try:
                with path.open("xb") as file:
                    file.write(content)
            except FileExistsError:
                continue
            yield path
            break


def document(result: PythonResult, saved: list[list[Path]]) -> dict[str, Any]:
    """The JSON form. Pictures are base64, as the kernel gives them."""
    error = result.error
    return {
        "exec_id": result.exec_id,
        "status": result.status,
        "text": result.text,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "error": None if error is None else {"name": error.name, "value": error.value, "traceback": error.traceback},
        "results": [
            {"data": one.data, "is_result": one.is_result, "omitted": list(one.omitted), "saved": [str(path) for path in paths]}
            for one, paths in zip(result.results, saved, strict=True)
        ],
        "execution_count": result.execution_count,
        "kernel": result.kernel,
        "restarted": result.restarted,
        "reason": result.reason,
        "truncated": result.truncated,
    }
