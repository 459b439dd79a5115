"""``moechat quantize``: a model's folder in another public weight format."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from moechat.cli import options
from moechat.cli.interrupt import EXIT_CODE as EXIT_INTERRUPTED
from moechat.cli.interrupt import Interrupt
from moechat.cli.list import format_bytes

if TYPE_CHECKING:
    from moechat.quantize.plan import TargetFormat
    from moechat.quantize.report import Report
    from moechat.quantize.run import Progress

_FORMATS = ("int4", "fp8", "bf16")
_REFRESH_SECONDS = 0.1
_SHOWN_LEFT = 5


def _parse_format(text: str) -> str:
    if text not in _FORMATS:
        raise typer.BadParameter(f"{text[:40]!a} is not one of {', '.join(_FORMATS)}")
    return text


SourceArgument = Annotated[
    str,
    typer.Argument(
        help="A name that `moechat list` shows, or a folder in Hugging Face layout.",
        metavar="SRC",
    ),
]
TargetArgument = Annotated[Path, typer.Argument(help="The folder to make.", metavar="DST")]
ToFormat = Annotated[
    str,
    typer.Option(
        "--to",
        parser=_parse_format,
        metavar="int4|fp8|bf16",
        help="The format to write.",
    ),
]


def quantize(
    source: SourceArgument,
    target: TargetArgument,
    to: ToFormat,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Write a model in another weight format.

    DST becomes a model folder that moechat and other programs read. Memory stays small whatever the
    model, the disk is checked first, and an interrupted run goes on where it stopped when the same
    command is given again. SRC is only read.

    \b
      moechat quantize mini ./mini-int4 --to int4
      moechat quantize /models/deepseek-v3 /models/deepseek-v3-int4 --to int4 --json

    \b
      int4  compressed-tensors, groups of 32 with a BF16 scale: 4.5 bits a weight
      fp8   e4m3 with a float32 scale for each block of 128x128: 8 bits a weight
      bf16  no quantisation: 16 bits a weight

    Projections of attention and feed-forward layers are converted; embeddings, head, norms, biases
    and routers stay as they are. The report on stdout tells the error that rounding introduced, by
    kind of tensor: root mean square of the change, relative to that of the weights.
    """
    from moechat.quantize.job import Job
    from moechat.registry import load_registry
    from moechat.terminal.neutralise import one_line

    folder = load_registry().resolve(source).path
    destination = Path(os.path.abspath(os.path.expanduser(target)))
    job = Job(folder, destination, cast("TargetFormat", to))
    facts = {"source": str(folder), "target": str(target), "to": to}
    if job.is_complete:
        if as_json:
            typer.echo(json.dumps(facts | {"already_complete": True}, indent=2))
        else:
            typer.echo(f"{one_line(str(target))} is complete already; nothing was left to do")
        return 0
    with (
        Interrupt() as interrupt,
        interrupt.cancels(job.cancel),
        _ProgressBar(f"{source} to {to}") as bar,
    ):
        report = job.run(bar.update)
    if report is None:
        done = bar.last
        share = f" after {format_bytes(done.bytes_done)} of {format_bytes(done.num_bytes)}"
        print(
            f"interrupted{share if done.num_bytes else ''}; the same command goes on from there",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    if as_json:
        facts |= {"already_complete": False} | report.as_json()
        typer.echo(json.dumps(facts, indent=2))
        return 0
    for line in _lines(report, target):
        typer.echo(line)
    return 0


class _ProgressBar:
    """A bar on stderr when that is a terminal; it remembers how far the job is in any case."""

    def __init__(self, title: str) -> None:
        from moechat.quantize.run import Progress

        self.last = Progress(0, 0, 0, 0)
        self._title = title
        self._bar: Any = None
        self._shown_at = 0.0

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._draw()  # the last of it may have come too soon after another
            self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show how far the job is; at most ten times a second."""
        from moechat.terminal.sinks import escapes_allowed

        begins = self.last.num_bytes == 0
        self.last = progress
        now = time.monotonic()
        if begins and escapes_allowed(sys.stderr):
            self._start(progress)
        if self._bar is None or now - self._shown_at < _REFRESH_SECONDS:
            return
        self._shown_at = now
        self._draw()

    def _draw(self) -> None:
        tensors = f"{self.last.tensors_done}/{self.last.num_tensors} tensors"
        self._bar.update(0, completed=self.last.bytes_done, tensors=tensors)
        self._bar.refresh()

    def _start(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        from moechat.terminal.neutralise import one_line

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[tensors]}", markup=False),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            # A thread that refreshes would be one more that the interpreter lock goes to.
            auto_refresh=False,
        )
        self._bar.add_task(
            one_line(self._title),
            total=progress.num_bytes,
            completed=progress.bytes_done,
            tensors="",
        )
        self._bar.start()
        # A second Ctrl-C ends the process at once, and must not leave the cursor hidden.
        self._bar.console.show_cursor(True)


def _lines(report: Report, target: Path) -> list[str]:
    """The report for people."""
    from moechat.terminal.neutralise import one_line

    table = [("KIND", "TENSORS", "BEFORE", "AFTER", "ERROR", "LARGEST", "OF")]
    for row in report.kinds:
        table.append(
            (
                row.kind,
                str(row.num_tensors),
                format_bytes(row.bytes_before),
                format_bytes(row.bytes_after),
                _percent(row.relative_rms_error),
                _percent(row.worst_relative_rms_error),
                one_line(row.worst_tensor or "-"),
            )
        )
    before, after = format_bytes(report.bytes_before), format_bytes(report.bytes_after)
    tensors = str(sum(row.num_tensors for row in report.kinds))
    table.append(("all", tensors, before, after, "", "", ""))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    if report.left:
        shown = ", ".join(map(one_line, report.left[:_SHOWN_LEFT]))
        more = len(report.left) - _SHOWN_LEFT
        lines.append(
            f"not quantised, since {report.to} needs columns in groups of 32: {shown}"
            + (f" and {more} more" if more > 0 else "")
        )
    rate = report.as_json()["read_mb_per_second"]
    files = f"{report.num_files} file" + ("s" if report.num_files != 1 else "")
    lines.append(f"{one_line(str(target))}: {files}, {report.seconds:.1f} s, {rate:g} MB/s read")
    return lines


def _percent(fraction: float | None) -> str:
    """A relative error for people; "-" when nothing was rounded."""
    return "-" if fraction is None else f"{100 * fraction:.3g} %"
