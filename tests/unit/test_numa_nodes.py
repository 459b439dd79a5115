"""NUMA nodes from a faked sysfs, and free memory from faked meminfo files."""

from __future__ import annotations

import os

import pytest

from moechat import _native
from moechat.weights.free_memory import free_memory_bytes, free_node_bytes

CPUS = sorted(os.sched_getaffinity(0))


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def nodes_of(tmp_path, **lists):
    for name, text in lists.items():
        write(tmp_path, f"{name}/cpulist", text)
    return _native.numa_nodes(str(tmp_path))


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU makes one node")
def test_nodes_with_cpus_of_this_process(tmp_path):
    first, rest = CPUS[0], CPUS[1:]
    listing = ",".join(map(str, rest)) + f",{CPUS[-1] + 1}-{CPUS[-1] + 9}\n"
    nodes_of(tmp_path, node3="\n", nodes="0-1", node4x="0", xnode5="0")  # no nodes with CPUs
    found = nodes_of(tmp_path, node10=f"{first}\n", node2=listing)
    assert found == [(2, rest), (10, [first])]


def test_ranges(tmp_path):
    assert nodes_of(tmp_path, node0="0-1023\n") == [(0, CPUS)]


@pytest.mark.parametrize("text", ["", "-", "x", "99999999999999999999", "5-", "1000000-2000000"])
def test_a_list_that_says_nothing_is_one_node_of_all(tmp_path, text):
    assert nodes_of(tmp_path, node0=text) == [(-1, CPUS)]


def test_no_folder_and_too_many_nodes_are_one_node(tmp_path):
    assert _native.numa_nodes(str(tmp_path / "missing")) == [(-1, CPUS)]
    lists = {f"node{n}": f"{CPUS[0]}" for n in range(17)}
    assert nodes_of(tmp_path, **lists) == [(-1, CPUS)]


def test_this_machine_has_nodes():
    nodes = _native.numa_nodes()
    assert sorted(cpu for _, cpus in nodes for cpu in cpus) == CPUS
    assert _native.ThreadPool(2, nodes).num_nodes == len(nodes)


def test_free_memory_is_the_least_of_what_is_known(tmp_path):
    assert free_memory_bytes(tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:   7000 kB\n")
    assert free_memory_bytes(tmp_path) == 7000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    assert free_memory_bytes(tmp_path) == 7000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "5000000\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "4000000\n")
    stat = "anon 1\ninactive_file 300000\nactive_file 20000\nworkingset_active_file 7\n"
    write(tmp_path, "sys/fs/cgroup/memory.stat", stat)
    assert free_memory_bytes(tmp_path) == 1_320_000


def test_free_memory_of_nodes(tmp_path):
    text = (
        "Node 3 MemTotal:  999 kB\nNode 3 MemFree:  10 kB\nNode 3 Active(file):  3 kB\n"
        "Node 3 Inactive(file):  4 kB\n"
    )
    write(tmp_path, "sys/devices/system/node/node3/meminfo", text)
    assert free_node_bytes([3, 1], tmp_path) == [17 * 1024, None]
