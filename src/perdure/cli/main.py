"""The ``perdure`` command: thin words over the SDK. Errors are one sentence and what to do; a traceback is never shown."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import Abort, TyperException

import perdure
from perdure.cli import commands, interrupts
from perdure.cli.arguments import ASKED, asks_json, prepare
from perdure.cli.output import JsonFlag, Shared, Status, complain, note, swallow_stdout
from perdure.core import collector
from perdure.core.errors import InvalidRequest, PerdureError

if TYPE_CHECKING:
    from pydantic import ValidationError

app = typer.Typer(
    name="perdure",
    help="Persistent machines for AI agents: they sleep in milliseconds and wake with memory, files and processes intact.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"perdure {perdure.__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    as_json: JsonFlag = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    ctx.obj.json = ctx.obj.json or as_json  # it may stand after the command, whose own mistakes come before it is read


class Usage(InvalidRequest):
    code = "usage"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    if argv is None:
        collector.spare()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == [ASKED]:
        return _complete(given[1:])
    words = prepare(given)
    shared = Shared(json=asks_json(words))
    interrupts.listen()
    try:
        with interrupts.restored():
            return _run(words, shared)
    except PerdureError as error:
        complain(error, as_json=shared.json)
        return shared.failure_code
    except TyperException as error:
        said = error.format_message().rstrip(".") or "Missing command"  # a group alone has printed its help instead
        complain(Usage(f"{said}.", hint="Try 'perdure --help', or --help after the command."), as_json=shared.json)
        return 2
    except (KeyboardInterrupt, Abort):
        return _interrupted()
    except BrokenPipeError:
        swallow_stdout()
        return 141
    except Exception as error:  # noqa: BLE001 - the top of the program: a defect is told in one sentence too
        complain(_explained(error), as_json=shared.json)
        return shared.failure_code


def _complete(words: list[str]) -> int:
    """A shell asks what a word may become. It draws a prompt: nothing must be said beside the answer."""
    from perdure.cli import completion

    try:
        return completion.answer(words)
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001 - the top of the program: a shell cannot show a defect
        return 1


def _run(words: list[str], shared: Shared) -> int:
    root = typer.main.get_group(app)
    commands.fill(root)
    result = root(args=words, prog_name="perdure", standalone_mode=False, obj=shared)
    if isinstance(result, Status):
        return result.code
    if result == 130:  # typer's word for Ctrl-C
        return _interrupted()
    return result if isinstance(result, int) else 0


def _interrupted() -> int:
    note("Interrupted. Workspaces and what runs in them go on.")
    return 130


def _explained(error: Exception) -> PerdureError:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return _bad_value(error)
    from perdure.core.config import Settings

    if Settings().log_level == "debug":
        traceback.print_exc()
    return PerdureError(
        f"perdure failed because of a defect of its own ({type(error).__name__}: {error}).",
        hint="Set PERDURE_LOG_LEVEL=debug and run it again to see where.",
    )


def _bad_value(error: ValidationError) -> PerdureError:
    from perdure.core.config import Settings

    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if error.title != Settings.__name__:
        return PerdureError(f"The server's answer was not understood: {name}: {first['msg']}.", hint="Use the server's version.")
    return InvalidRequest(f"The setting PERDURE_{name.upper()} is not valid: {first['msg']}.", hint="Correct it, or unset it.")


if __name__ == "__main__":
    sys.exit(main())
