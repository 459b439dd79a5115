"""The command line as a whole: its verbs, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from moechat.errors import MoechatError, Usage, system_error_text

# Only what an error needs is imported above; main() imports the rest inside its `try`, so that
# Ctrl-C during start-up is as quiet as later.

EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141  # what a shell reports of a program that SIGPIPE ended

_HELP = """Chat with Mixture-of-Experts models on this machine.

\b
  moechat run mini                         chat
  moechat run mini "a question"            one answer
  cat notes.txt | moechat run mini "What is the code of Clara?"
  moechat batch questions.jsonl            an answer to each line, as JSON
  moechat list                             the models that have a name

\b
Exit codes: 0 complete, 1 failure, 2 usage, 3 model or file missing or damaged,
4 does not fit, 6 batch with failed lines, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return the exit code."""
    missing = _open_missing_streams()
    invocation: Any = None
    try:
        if "stdout" in missing:
            raise Usage("stdout is closed", "there is nowhere for an answer to go")
        if argv is None:
            from moechat.cli.interrupt import Interrupt
            from moechat.lost_signals import keep_lost_signals

            keep_lost_signals()
            # Never left: another Ctrl-C while the interpreter ends would print a traceback.
            Interrupt(whole_process=True).__enter__()
        from moechat.cli.options import Invocation

        invocation = Invocation()
        code = _dispatch(list(sys.argv[1:] if argv is None else argv), invocation)
        # Here, so that a full disk or a closed pipe is an error and not a remark at exit.
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if _is_terminal(sys.stderr):
            _say("\rinterrupted")  # over the ^C that the terminal wrote
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return EXIT_CLOSED_PIPE
    except MoechatError as error:
        if invocation is not None and invocation.debug:
            _print_traceback()
        _report(error)
        return error.exit_code
    except OSError as error:
        if invocation is not None and invocation.debug:
            _print_traceback()
        _say_folded(f"error: {system_error_text(error)} [os-error]")
        _abandon_stdout()
        return 1
    except Exception as error:
        if invocation is not None and invocation.debug:
            _print_traceback()
        first_line = (str(error).splitlines() or [""])[0]
        _say_folded(
            f"internal error: {type(error).__name__}: {first_line} "
            "(`moechat --debug …` shows the traceback)"
        )
        return 1


def build_command() -> Any:
    """The whole command tree, as typer's command object."""
    import typer

    from moechat.cli.batch import batch
    from moechat.cli.bench import build_app as build_bench
    from moechat.cli.doctor import doctor
    from moechat.cli.eval import build_app as build_eval
    from moechat.cli.list import list_models
    from moechat.cli.options import remember_debug
    from moechat.cli.quantize import quantize
    from moechat.cli.run import run
    from moechat.cli.show import show

    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            from moechat import __version__

            typer.echo(f"moechat {__version__}")
            raise typer.Exit()

    @app.callback(help=_HELP, invoke_without_command=True)
    def callback(
        version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, help="Print the version."
        ),
        debug: bool = typer.Option(
            False,
            "--debug",
            callback=remember_debug,
            is_eager=True,
            help="Show the traceback of an error.",
        ),
    ) -> None:
        pass

    app.command("run")(run)
    app.command("batch")(batch)
    app.command("list")(list_models)
    app.command("show")(show)
    app.command("quantize")(quantize)
    app.command("doctor")(doctor)
    app.add_typer(build_bench(), name="bench")
    app.add_typer(build_eval(), name="eval")
    command = typer.main.get_command(app)
    _list_whole_sentences(command)
    return command


def _list_whole_sentences(group: Any) -> None:
    """Have the list of commands show the first sentence of each; click would cut it."""
    for command in group.commands.values():
        paragraph = " ".join((command.help or "").split("\n\n")[0].split())
        command.short_help = paragraph.split(". ")[0].removesuffix(".") + "."
        if hasattr(command, "commands"):
            _list_whole_sentences(command)


def _dispatch(arguments: list[str], invocation: Any) -> int:
    import typer

    command = build_command()
    if set(arguments) <= {"--debug"}:  # no verb: a chat
        if not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
            with command.make_context("moechat", ["run"], resilient_parsing=True) as context:
                _say(command.get_help(context))
            return Usage.exit_code
        arguments = [*arguments, "run", "mini"]
    # typer gives its exceptions no public base; all usage errors share that of BadParameter.
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        # Not command.main(), which would turn some exceptions into exits of its own.
        with command.make_context("moechat", arguments, obj=invocation) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except usage_error as error:
        path = error.ctx.command_path if error.ctx is not None else "moechat"
        what = " ".join(error.format_message().split()).removesuffix(".")
        hint = f"See `{path} --help`"
        if what.startswith("No such command") and path.endswith("bench") and what[-1] != "?":
            hint = f"A model is measured by `moechat bench model NAME`. {hint}"
        if "extra argument" in what:
            hint = f"A question of several words needs quotes. {hint}"
        if what.endswith("?"):  # a question of click's own: no full stop belongs after it
            raise Usage(f"{what} {hint}") from None
        raise Usage(what, next_step=hint) from None


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _report(error: MoechatError) -> None:
    from moechat.terminal.sinks import format_error

    _say_folded(format_error(error))


def _say_folded(line: str) -> None:
    from moechat.terminal_size import fold_words

    with contextlib.suppress(OSError, ValueError):  # stderr is closed: _say is silent, too
        line = fold_words(line, sys.stderr)
    _say(line)


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: nobody is to be told
        print(line, file=sys.stderr, flush=True)


def _print_traceback() -> None:
    import traceback

    _say(traceback.format_exc().rstrip())


def _open_missing_streams() -> list[str]:
    """Give closed standard streams a harmless file, so that no model file gets their number.

    Returns the names of those that were closed.
    """
    missing: list[str] = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = os.O_RDONLY if number == 0 else os.O_WRONLY
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            missing.append(name)
    for name in ("stdout", "stderr"):
        # A terminal of another encoding shows "?" for what it lacks.
        getattr(sys, name).reconfigure(errors="replace")
    return missing


def _abandon_stdout() -> None:
    """Let the interpreter's last flush go nowhere: stdout cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
