"""``moechat list``."""

import json
import re

import pytest

from moechat.cli.list import format_bytes


def test_list_names_what_is_here_and_what_is_not(moechat):
    result = moechat("list")
    assert (result.code, result.stderr) == (0, "")
    head, *rows = [re.split("  +", line) for line in result.stdout.splitlines()]
    assert head == ["NAME", "PARAMETERS", "SIZE", "HERE", "CONTEXT", "LICENSE"]
    by_name = {row[0]: row[1:] for row in rows}
    mini = ["31.7M (11M active)", "34.9 MB", "yes", "4096", "Apache-2.0"]
    assert by_name["mini"] == mini
    large = ["671B (37B active)", "689 GB", "no", "163840", "DeepSeek model licence"]
    assert by_name["deepseek-v3"] == large
    assert by_name["gpt-oss-20b"][0] == "20.9B (3.6B active)"


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_no_word_is_cut_on_a_narrow_terminal(moechat, monkeypatch, columns):
    words = moechat("list").stdout.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = moechat("list", terminals="o").stdout
    assert all(len(line) < columns for line in shown.splitlines())
    assert sorted(shown.split()) == sorted(words)


def test_a_gguf_file_of_ones_own_is_here(moechat, tmp_path):
    own = tmp_path / "home" / "config" / "models.toml"
    own.parent.mkdir(parents=True)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    own.write_text(f'[own]\nfolder = "{tmp_path}/broken.gguf"\n')
    models = {row["name"]: row for row in json.loads(moechat("list", "--json").stdout)["models"]}
    assert models["own"]["present"] is True and "parameters" not in models["own"]


def test_list_json_is_one_object_that_leaves_out_what_is_unknown(moechat, tmp_path):
    own = tmp_path / "home" / "config" / "models.toml"
    own.parent.mkdir(parents=True)
    own.write_text(f'["own\\u001b[31m"]\nfolder = "{tmp_path}"\n')
    models = {row["name"]: row for row in json.loads(moechat("list", "--json").stdout)["models"]}
    assert models["mini"]["present"] is True
    assert models["mini"]["license"] == "Apache-2.0"
    assert models["deepseek-v3"]["present"] is False and "folder" not in models["deepseek-v3"]
    name = "own\x1b[31m"
    assert models[name] == {"name": name, "present": True, "folder": str(tmp_path)}
    assert "\x1b" not in moechat("list").stdout


def test_broken_own_registry_is_a_usage_error(moechat, tmp_path):
    own = tmp_path / "home" / "config" / "models.toml"
    own.parent.mkdir(parents=True)
    own.write_text("[broken")
    result = moechat("list")
    assert (result.code, result.stdout) == (2, "") and "models.toml" in result.stderr


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (34_894_924, "34.9 MB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (688_574_839_360, "689 GB"),
        (10**16, "10000 TB"),
        (None, "-"),
        ("x", "-"),
        (-1, "-"),
    ],
)
def test_sizes_for_people(size_bytes, text):
    assert format_bytes(size_bytes) == text
