"""From settings to output, whoever parsed the command line: progress, Ctrl-C, JSON, text, picture.

Text and JSON go to stdout, progress to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moechat.bench import pictures
from moechat.bench.drawing import Drawing, check_plot_path
from moechat.bench.ending import unwinds_when_ended
from moechat.bench.kernels.measure import measure_kernels
from moechat.bench.kernels.report import kernel_text
from moechat.bench.model.measure import measure_model
from moechat.bench.model.report import model_text
from moechat.bench.settings import KernelSettings, ModelSettings
from moechat.bench.status_line import StatusLine
from moechat.bench.synthetic.measure import measure_synthetic
from moechat.bench.synthetic.report import synthetic_text
from moechat.bench.table import Text, print_text
from moechat.errors import Usage

EXIT_CODE = 130


def run_kernels(settings: KernelSettings, *, as_json: bool, plot: Path | None) -> None:
    """``bench kernels``. Raises MoechatError."""
    if plot is not None:
        check_plot_path(plot)
    with StatusLine(sys.stderr) as line, _ends_at_ctrl_c(line.erase):
        report = measure_kernels(settings, line.show)
    _output(report, as_json, kernel_text, plot, pictures.roofline)


def run_model(model: str, settings: ModelSettings, *, as_json: bool, plot: Path | None) -> None:
    """``bench model MODEL``. Raises MoechatError."""
    if plot is not None:
        check_plot_path(plot)
    with StatusLine(sys.stderr) as line:
        report = measure_model(model, settings, line.show)
    _output(report, as_json, model_text, plot, pictures.rates)


def run_synthetic(
    name: str | None, settings: ModelSettings, *, as_json: bool, plot: Path | None
) -> None:
    """``bench --synthetic NAME``; without a name there is nothing to do. Raises MoechatError."""
    if name is None:
        raise Usage(
            "it is not said what to measure",
            "there is neither a sub-command nor --synthetic",
            "`moechat bench model mini`, `moechat bench --synthetic deepseek-v3` or "
            "`moechat bench kernels`",
        )
    if plot is not None:
        check_plot_path(plot)
    with unwinds_when_ended(), StatusLine(sys.stderr) as line:
        report = measure_synthetic(name, settings, line.show, line.say)
    _output(report, as_json, synthetic_text, plot, pictures.rates)


def _output(
    report: dict[str, Any],
    as_json: bool,
    text: Callable[[dict[str, Any]], Text],
    plot: Path | None,
    picture: Callable[[dict[str, Any]], Drawing],
) -> None:
    if as_json:
        print(json.dumps(report, indent=2), flush=True)
    else:
        print_text(text(report), sys.stdout)
    if plot is not None:
        picture(report).write(plot)


@contextmanager
def _ends_at_ctrl_c(before_exit: Callable[[], None]) -> Iterator[None]:
    """While it is open, SIGINT ends the process with 130 after ``before_exit``. Main thread only.

    Python's own handler would wait for a native call to return, which may take minutes. Nothing
    needs to be cleaned up: the only file has no name any more. A SIGINT that the parent had ignored
    stays ignored.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while numbers := os.read(reader, 16):  # signal numbers as they come; empty: closed
            if signal.SIGINT in numbers:
                before_exit()
                os._exit(EXIT_CODE)
        os.close(reader)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)
