"""Measurements of this machine, run by hand: ``python tests/measure.py [name ...]``.

Not tests: they print medians and spreads, and a ratio against a rate of the same run wherever one
exists, since shared machines change speed by a factor of two. Names: start speed memory gemv idle
busy. Process-level figures use the moechat that this Python would run.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

QUESTION = "What is the capital of Norway?"
MOECHAT = [sys.executable, "-m", "moechat"]


def spread(values: list[float], unit: str, digits: int = 3) -> str:
    """Median and range of some values."""
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{mid:.{digits}f} {unit} (min {low:.{digits}f}, max {high:.{digits}f}, n={len(values)})"


def start() -> None:
    """Process start to the first byte of a one-shot answer; and what it imports."""
    seconds = []
    for _ in range(11):
        began = time.perf_counter()
        command = [*MOECHAT, "run", "mini", "--temperature", "0", QUESTION]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds.append(time.perf_counter() - began)
    print("start to first token:", spread(seconds[1:], "s"), "- wanted <= 0.5")
    code = (
        "import sys; from moechat.cli.app import main\n"
        f"sys.argv = ['moechat', 'run', 'mini', {QUESTION!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'rich', 'prompt_toolkit')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    print("heavy modules imported by a one-shot answer:", output.stderr.strip().splitlines()[-1])


def speed() -> None:
    """Decode and prefill rates of mini on two threads, alternating in one process."""
    from moechat import Engine, SamplingParams

    decode, decode_long, prefill, ratios = [], [], [], []
    params = SamplingParams(temperature=0, max_tokens=400, ignore_end=True)
    with Engine.open("mini", threads=2) as engine:
        for round_ in range(6):
            *_, short = engine.session().generate([0, 3, 1204, 5, 4], params)
            ids = [5 + (7 * i + round_) % 8000 for i in range(2000)]
            *_, long = engine.session().generate(ids, params)
            if round_ == 0:
                continue  # warm-up
            decode.append(short.stats.decode_tokens_per_second)
            decode_long.append(long.stats.decode_tokens_per_second)
            prefill.append(long.stats.prefill_tokens_per_second)
            ratios.append(prefill[-1] / decode[-1])
    print("decode from an empty context:", spread(decode, "tok/s", 0), "- wanted >= 500")
    print("decode after 2,000 tokens:", spread(decode_long, "tok/s", 0))
    print("prefill of 2,000 tokens:", spread(prefill, "tok/s", 0))
    print("prefill / decode from an empty context:", spread(ratios, "x", 2), "- wanted >= 4")
    long_ratios = [a / b for a, b in zip(prefill, decode_long)]
    print("prefill / decode after the prompt:", spread(long_ratios, "x", 2))


def _anonymous_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match.group(1)) * 1024


def memory() -> None:
    """Anonymous memory from just before Engine.open to the end of a 20-turn chat."""
    from moechat import Engine, SamplingParams
    from moechat.engine.conversation import Conversation

    before = _anonymous_bytes()
    with Engine.open("mini", threads=2) as engine:
        opened = _anonymous_bytes()
        conversation = Conversation(engine)
        for turn in range(20):
            question = f"What is {turn} plus 3?" if turn % 2 else "Tell me a story about a fox."
            for _ in conversation.ask(question, SamplingParams(temperature=0, max_tokens=120)):
                pass
        after = _anonymous_bytes()
        used = conversation.used_tokens
    megabytes = 1e6
    print(
        f"anonymous memory: +{(opened - before) / megabytes:.1f} MB after opening, "
        f"+{(after - before) / megabytes:.1f} MB after 20 turns ({used} tokens) - wanted < 30"
    )


def gemv() -> None:
    """FP8 GEMV by instruction set against plain reading."""
    from measure_gemv import gemv as table

    table("fp8", 1)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle() -> None:
    """CPU use of a chat that waits at its prompt, after one answer."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(MOECHAT[0], [*MOECHAT, "run", "mini", "--no-history"])
    reader = threading.Thread(target=_drain, args=(terminal,), daemon=True)
    reader.start()
    time.sleep(3)
    os.write(terminal, b"Hello!\r")
    time.sleep(3)
    began = _cpu_seconds(pid)
    time.sleep(10)
    used = (_cpu_seconds(pid) - began) / 10
    print(f"idle at the prompt for 10 s: {100 * used:.2f} % of one core - wanted < 1")
    os.write(terminal, b"\x04")
    os.waitpid(pid, 0)


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        pass


def busy() -> None:
    """Decode beside two busy loops pinned to the two cores, against decode alone, alternating."""
    from moechat import Engine, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1000, ignore_end=True)
    cpus = sorted(os.sched_getaffinity(0))[:2]
    ratios = []
    with Engine.open("mini", threads=2) as engine:

        def rate() -> float:
            *_, last = engine.session().generate([0, 3, 1204, 5, 4], params)
            return float(last.stats.decode_tokens_per_second)

        rate()
        for _ in range(5):
            alone = rate()
            loops = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        f"import os\nos.sched_setaffinity(0, [{cpu}])\nwhile 1: pass",
                    ]
                )
                for cpu in cpus
            ]
            time.sleep(0.5)
            beside = rate()
            for loop in loops:
                loop.kill()
                loop.wait()
            ratios.append(beside / alone)
    print("decode beside two busy loops / alone:", spread(ratios, "x", 2), "- wanted >= 0.35")


MEASUREMENTS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (start, speed, memory, gemv, idle, busy)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=" ".join(MEASUREMENTS))
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        parser.error(f"{unknown[0]!a} is none of {' '.join(MEASUREMENTS)}")
    if not names:
        # Each in a process of its own: memory is measured from a clean start.
        for name in MEASUREMENTS:
            subprocess.run([sys.executable, __file__, name], check=True)
    for name in names:
        MEASUREMENTS[name]()


if __name__ == "__main__":
    main()
