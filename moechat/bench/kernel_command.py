"""``bench kernels`` from its settings to its output, for both command lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moechat.bench.interrupt import ends_at_ctrl_c
from moechat.bench.kernel_settings import KernelSettings
from moechat.bench.kernel_table import print_table
from moechat.bench.kernels import measure_kernels
from moechat.bench.roofline_plot import check_plot_path, write_plot
from moechat.bench.status_line import StatusLine


def run_kernels(settings: KernelSettings, *, as_json: bool, plot: Path | None) -> None:
    """Measure, then print a table, or one JSON object, on stdout. Raises MoechatError."""
    if plot is not None:
        check_plot_path(plot)
    line = StatusLine(sys.stderr)
    with ends_at_ctrl_c(line.erase):
        report = measure_kernels(settings, line.show)
    if as_json:
        print(json.dumps(report, indent=2), flush=True)
    else:
        print_table(report, sys.stdout)
    if plot is not None:
        write_plot(report, plot)
