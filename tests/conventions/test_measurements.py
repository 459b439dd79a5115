"""Measurements that are run by hand say how, on any machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# All in one process, since torch takes seconds to load. One that is not there is no fault.
ASK = """
import contextlib, io, os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            runpy.run_path(path, run_name="__main__")
        what = "it went on"
    except ModuleNotFoundError as error:
        what = "" if error.name in ("torch", "triton") else str(error)
    except SystemExit as error:
        what = "" if error.code == 0 and shown.getvalue().startswith("usage:") else str(error.code)
    except BaseException as error:
        what = repr(error)
    if what:
        print(path, what)
"""


def test_every_measurement_prints_its_help():
    scripts = [str(path) for path in sorted(TESTS.glob("measure*.py"))]
    assert len(scripts) > 15
    asked = subprocess.run(
        [sys.executable, "-c", ASK, *scripts], capture_output=True, text=True, timeout=120
    )
    assert (asked.stdout, asked.returncode) == ("", 0), asked.stderr
