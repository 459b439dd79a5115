"""Stand-ins for standard streams."""

from __future__ import annotations

import io

import pyte


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(output: str, columns: int = 80, rows: int = 24) -> str:
    """What a terminal shows of ``output``, scrollback included, without blanks at line ends."""
    screen = pyte.HistoryScreen(columns, rows, history=100_000)
    pyte.Stream(screen).feed(output.replace("\n", "\r\n"))
    top = ["".join(row[x].data for x in range(columns)) for row in screen.history.top]
    return "\n".join(row.rstrip() for row in [*top, *screen.display]).rstrip()
