"""Jobs that are killed, interrupted or out of disk, and taken up again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from moechat.errors import CheckpointDamaged, MoechatError, Usage
from moechat.quantize import run as run_module
from moechat.quantize.job import Job
from moechat.quantize.target import JOURNAL_NAME

SHARD_BYTES = 60_000

# A process that runs the job with a commit after every layer, and kills itself at the N-th call of
# what brings files to disk, before or after the call. Without N it prints how many calls there are.
KILLED = """
import os, signal, sys
from pathlib import Path
from moechat.quantize import run
from moechat.quantize.job import Job

source, target, to, shard_bytes, kill_at, moment = sys.argv[1:]
run.COMMIT_BYTES = 1
calls = 0

def watch(name):
    real = getattr(os, name)
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == int(kill_at) and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if calls == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(os, name, call)

for name in ("fsync", "replace", "unlink", "mkdir", "write"):
    watch(name)
Job(Path(source), Path(target), to, shard_bytes=int(shard_bytes)).run(lambda progress: None)
print(calls)
"""


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run_killed(source, target, kill_at, moment="before", shard_bytes=SHARD_BYTES):
    settings = ("int4", str(shard_bytes), str(kill_at), moment)
    return subprocess.run(
        [sys.executable, "-c", KILLED, source, target, *settings],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_worker(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture
def uninterrupted(tmp_path, source, convert):
    convert(source, tmp_path / "whole", "int4")
    return contents(tmp_path / "whole")


def test_killed_at_any_moment_and_run_again_it_gives_the_same_bytes(
    tmp_path, source, convert, uninterrupted
):
    counted = run_killed(source, tmp_path / "counted", 0)
    num_calls = int(counted.stdout)
    assert contents(tmp_path / "counted") == uninterrupted and num_calls > 40
    resumed = complete = 0
    for number, kill_at in enumerate([1, 2, 3, *range(5, num_calls, 12), num_calls]):
        target, moment = tmp_path / str(kill_at), ("before", "after")[number % 2]
        killed = run_killed(source, target, kill_at, moment)
        assert killed.returncode == -signal.SIGKILL
        if (target / "config.json").exists() and not (target / JOURNAL_NAME).exists():
            assert Job(source, target, "int4", shard_bytes=SHARD_BYTES).is_complete
            complete += 1
        else:
            resumed += convert(source, target, "int4").resumed
        assert contents(target) == uninterrupted, f"killed {moment} call {kill_at}"
    assert resumed > 5 and complete <= 2


def test_killed_twice(tmp_path, source, convert, uninterrupted):
    target = tmp_path / "target"
    assert run_killed(source, target, 20).returncode == -signal.SIGKILL
    assert run_killed(source, target, 12, "after").returncode == -signal.SIGKILL
    report = convert(source, target, "int4")
    assert report.resumed and contents(target) == uninterrupted


def test_what_is_done_is_not_done_again_and_still_reported(tmp_path, source, convert):
    whole = convert(source, tmp_path / "whole", "int4")
    run_killed(source, tmp_path / "target", 30)
    rest = convert(source, tmp_path / "target", "int4")
    assert 0 < rest.read_bytes < whole.read_bytes
    assert rest.kinds == whole.kinds and rest.bytes_after == whole.bytes_after


@pytest.mark.parametrize("after", [1, 4, 9])
def test_cancelled_it_keeps_what_is_done(tmp_path, source, convert, uninterrupted, after):
    target, seen = tmp_path / "target", []
    job = Job(source, target, "int4", shard_bytes=SHARD_BYTES)

    def cancel_after_some(progress):
        seen.append(progress)
        if len(seen) == after:
            job.cancel()

    assert job.run(cancel_after_some) is None
    assert (target / JOURNAL_NAME).exists() and not (target / "config.json").exists()
    lines = (target / JOURNAL_NAME).read_bytes().splitlines()
    assert len(lines) - 1 == seen[-1].tensors_done >= 1
    report = convert(source, target, "int4")
    assert report.read_bytes == seen[-1].num_bytes - sum(
        job._plan.layers[json.loads(line)[0]].layer.stored_bytes for line in lines[1:]
    )
    assert contents(target) == uninterrupted


def test_progress_reaches_the_whole_also_when_resumed(tmp_path, source):
    run_killed(source, tmp_path / "target", 30)
    seen = []
    Job(source, tmp_path / "target", "int4", shard_bytes=SHARD_BYTES).run(seen.append)
    assert seen[0].tensors_done > 1
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert seen[-1].tensors_done == seen[-1].num_tensors
    assert seen[-1].bytes_done == seen[-1].num_bytes


def damage_journal(target, change):
    path = target / JOURNAL_NAME
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-3],  # the last line torn
        lambda content: content + b"[5, 0.",
        lambda content: content[: content.index(b"\n") + 1],  # only the identity
        lambda content: content[:20],  # not even that
        lambda content: b"",
    ],
)
def test_a_torn_journal_costs_work_only(tmp_path, source, convert, uninterrupted, change):
    target = tmp_path / "target"
    run_killed(source, target, 30)
    damage_journal(target, change)
    convert(source, target, "int4")
    assert contents(target) == uninterrupted


@pytest.mark.parametrize(
    "line",
    [b"[999, 0.0, 1.0]", b"[-1, 0.0, 1.0]", b'["a", 0.0, 1.0]', b"[1, null, 1.0]", b"{}", b"x"],
)
def test_a_journal_of_something_else_is_refused(tmp_path, source, convert, line):
    target = tmp_path / "target"
    run_killed(source, target, 30)
    damage_journal(target, lambda content: content + line + b"\n")
    before = contents(target)
    with pytest.raises(Usage, match="journal"):
        convert(source, target, "int4")
    assert contents(target) == before


def test_lost_parts_are_made_again(tmp_path, source, convert, uninterrupted):
    target = tmp_path / "target"
    run_killed(source, target, 30)
    parts = list(target.glob("*.part"))  # two where one was just begun
    assert parts
    for part in parts:
        part.unlink()
    convert(source, target, "int4")
    assert contents(target) == uninterrupted


def test_a_lost_part_is_not_believed_in_later_either(tmp_path, source, convert):
    """Killed while it makes a lost part again: what the journal said of the old one is void."""
    target, one_file = tmp_path / "target", 10**9
    convert(source, tmp_path / "whole", "int4", one_file)
    run_killed(source, target, 30, shard_bytes=one_file)
    (part,) = target.glob("*.part")
    size = part.stat().st_size
    part.unlink()
    run_killed(source, target, 12, "after", one_file)
    assert part.stat().st_size < size
    os.truncate(part, size)  # as if a later layer's end had been written first
    convert(source, target, "int4", one_file)
    assert contents(target) == contents(tmp_path / "whole")


def test_shortened_parts_are_made_again(tmp_path, source, convert, uninterrupted):
    target = tmp_path / "target"
    run_killed(source, target, 30)
    parts = list(target.glob("*.part"))
    assert parts
    for part in parts:
        os.truncate(part, 100)
    convert(source, target, "int4")
    assert contents(target) == uninterrupted


@pytest.mark.parametrize("what", ["format", "source", "size", "other file"])
def test_another_job_does_not_go_on_there(tmp_path, source, convert, what):
    target = tmp_path / "target"
    run_killed(source, target, 30)
    before, to, shard_bytes = contents(target), "int4", SHARD_BYTES
    if what == "format":
        to = "fp8"
    elif what == "size":
        shard_bytes += 1
    else:
        names = {"source": "model-00002-of-00003.safetensors", "other file": "tokenizer.json"}
        os.utime(source / names[what], (1, 1))
    with pytest.raises(Usage, match="another job"):
        convert(source, target, to, shard_bytes)
    assert contents(target) == before


def test_two_processes_do_not_write_one_folder(tmp_path, source):
    proceed = tmp_path / "proceed"
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom moechat.quantize.job import Job\n"
        "source, target, proceed = map(Path, sys.argv[1:])\n"
        "def wait(progress):\n"
        "    print('began', flush=True)\n"
        "    while not proceed.exists(): time.sleep(0.02)\n"
        "Job(source, target, 'int4').run(wait)\n"
    )
    target = tmp_path / "target"
    with subprocess.Popen(
        [sys.executable, "-c", script, source, target, proceed], stdout=subprocess.PIPE
    ) as first:
        assert first.stdout.readline() == b"began\n"
        with pytest.raises(Usage, match="another process"):
            Job(source, target, "int4").run(lambda progress: None)
        proceed.touch()
        assert first.wait(30) == 0
    assert (target / "config.json").exists()


def test_a_full_disk_is_named_and_the_rest_follows_later(tmp_path, source, convert, uninterrupted):
    target = tmp_path / "target"
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom moechat.errors import DoesNotFit\n"
        "from moechat.quantize.job import Job\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))\n"
        "try: Job(Path(sys.argv[1]), Path(sys.argv[2]), 'int4', shard_bytes=60_000).run(print)\n"
        "except DoesNotFit as error: print(error.message); sys.exit(error.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, source, target],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert ".part cannot be written" in done.stdout and "Make room" in done.stdout
    assert not (target / "config.json").exists()
    report = convert(source, target, "int4")
    assert report.resumed and contents(target) == uninterrupted


def test_a_worker_that_dies_is_an_error_and_costs_only_its_piece(
    tmp_path, source, convert, uninterrupted, monkeypatch
):
    target = tmp_path / "target"
    one_worker(monkeypatch)
    monkeypatch.setattr(run_module, "COMMIT_BYTES", 1)
    from moechat.quantize.convert import Converter

    real = Converter.__call__

    def dies(self, task):
        if task.layer_index == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, task)

    monkeypatch.setattr(Converter, "__call__", dies)
    with pytest.raises(MoechatError, match="worker process ended"):
        convert(source, target, "int4")
    monkeypatch.setattr(Converter, "__call__", real)
    assert convert(source, target, "int4").resumed
    assert contents(target) == uninterrupted


def test_an_error_in_the_source_keeps_what_is_done(tmp_path, source, convert, monkeypatch):
    one_worker(monkeypatch)
    target, shard = tmp_path / "target", source / "model-00003-of-00003.safetensors"
    job = Job(source, target, "int4", shard_bytes=SHARD_BYTES)
    size = shard.stat().st_size
    os.truncate(shard, 5000)
    with pytest.raises(CheckpointDamaged, match=shard.name):
        job.run(lambda progress: None)
    assert len((target / JOURNAL_NAME).read_bytes().splitlines()) > 5
    os.truncate(shard, size)


def test_workers_end_with_the_process_that_started_them(tmp_path, source):
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom moechat.quantize.job import Job\n"
        "def wait(progress):\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "    time.sleep(60)\n"
        "Job(Path(sys.argv[1]), Path(sys.argv[2]), 'int4').run(wait)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, source, tmp_path / "target"], stdout=subprocess.PIPE
    ) as process:
        workers = process.stdout.readline().split()
        assert workers
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{int(worker)}") for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_memory_stays_small_whatever_the_layer(tmp_path):
    """128 MB in one layer, mostly holes on disk: every process stays under that."""
    folder, rows, cols = tmp_path / "source", 8_192, 8_192
    folder.mkdir()
    name = "model.layers.0.self_attn.q_proj.weight"
    entry = {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [0, 2 * rows * cols]}
    text = json.dumps({name: entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * rows * cols)
    (folder / "config.json").write_text("{}")
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom moechat.quantize.job import Job\n"
        "import numpy\n"
        "Job(Path(sys.argv[1]), Path(sys.argv[2]), 'int4').run(lambda progress: None)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        # Of itself that would count what pytest had before it started this.
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, folder, tmp_path / "target"],
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert all(int(kilobytes) < 80_000 for kilobytes in done.stdout.split())
