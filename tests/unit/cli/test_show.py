"""``moechat show``."""

import json
import re
import shutil
from pathlib import Path

import pytest

from moechat import registry

MINI = Path(registry.__file__).parent / "data" / "mini"


def test_show_tells_what_mini_is(moechat):
    facts = json.loads(moechat("show", "mini", "--json").stdout)
    assert facts["architecture"] == "DeepseekV3ForCausalLM" and facts["present"] is True
    assert facts["geometry"]["num_experts"] == 32
    assert facts["context_tokens"] == 4096
    assert facts["defaults"] == {"temperature": 0.6, "top_p": 0.95}
    assert facts["chat_template"] is True
    # 6 layers of a 128-wide latent and a 32-wide rotary key
    assert facts["kv_bytes_per_token"] == {"bf16": 1920, "exact": 3840}
    sizes = {file["name"]: file["size_bytes"] for file in facts["files"]}
    assert sizes["config.json"] == (MINI / "config.json").stat().st_size
    assert facts["instruction_set"]


def test_show_for_people_has_the_same_facts(moechat):
    result = moechat("show", "mini")
    assert (result.code, result.stderr) == (0, "")
    lines = dict(
        line.strip().split(maxsplit=1) for line in result.stdout.splitlines() if "  " in line
    )
    assert lines["num_experts"] == "32" and lines["bf16"] == "1920"
    assert "\x1b" not in result.stdout


def test_show_works_without_weights_for_a_known_model(moechat):
    result = moechat("show", "deepseek-v3", "--json")
    facts = json.loads(result.stdout)
    assert result.code == 0 and facts["present"] is False
    assert facts["kv_bytes_per_token"]["bf16"] == 61 * (512 + 64) * 2
    assert facts["source"] == {"repository": "deepseek-ai/DeepSeek-V3"}


@pytest.mark.parametrize("name", ["mini", "deepseek-v3"])
def test_the_order_of_keys_is_the_same_for_all(moechat, name):
    keys = list(json.loads(moechat("show", name, "--json").stdout))
    assert keys[:5] == ["name", "architecture", "parameters", "active_parameters", "size_bytes"]
    common = ["context_tokens", "license", "source", "present", "precision", "geometry"]
    assert [key for key in keys if key in common] == common


def test_show_counts_parameters(moechat):
    facts = json.loads(moechat("show", "deepseek-v3", "--json").stdout)
    assert round(facts["parameters"] / 1e9) == 671
    assert round(facts["active_parameters"] / 1e9) == 37
    people = moechat("show", "deepseek-v3").stdout
    assert re.search(r"^parameters +671B \(37B active\)$", people, re.MULTILINE)
    assert "active parameters" not in people


def test_show_reads_a_folder_with_hostile_names(moechat, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(MINI / "config.json", folder)
    (folder / "a\x1b[31m\nb").write_bytes(b"1234")
    facts = json.loads(moechat("show", str(folder), "--json").stdout)
    assert facts["name"] == "own" and facts["chat_template"] is False
    assert facts["defaults"] == {}
    assert {"name": "a\x1b[31m\nb", "size_bytes": 4} in facts["files"]
    people = moechat("show", str(folder)).stdout
    assert "\x1b" not in people and "\nb" not in people


@pytest.mark.parametrize("arguments", [("nosuch",), ("",), (str(MINI / "config.json"),)])
def test_unknown_model_is_3(moechat, arguments):
    result = moechat("show", *arguments)
    assert (result.code, result.stdout) == (3, "") and "[model-not-found]" in result.stderr


def test_damaged_folder_is_3(moechat, tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = moechat("show", str(tmp_path))
    assert (result.code, result.stdout) == (3, "") and "[checkpoint-damaged]" in result.stderr


def own_folder(tmp_path, **files):
    shutil.copy(MINI / "config.json", tmp_path)
    for name, size_bytes in files.items():
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size_bytes))
    return tmp_path


def weights_bytes(moechat, folder):
    return json.loads(moechat("show", str(folder), "--json").stdout)["size_bytes"]


def test_only_weights_that_would_be_opened_count(moechat, tmp_path):
    folder = own_folder(tmp_path, model=5, consolidated=700)
    assert weights_bytes(moechat, folder) == 5
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes(bytes(20))
    owners = {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": owners}))
    assert weights_bytes(moechat, folder) == 25
    (folder / "b.safetensors").unlink()  # not yet downloaded
    assert weights_bytes(moechat, folder) == 5
    for hostile in {"x": "../own"}, {"x": "\0"}, {"x": ["a.safetensors"]}, {"x": ""}, [], None:
        index.write_text(json.dumps({"weight_map": hostile}))
        assert weights_bytes(moechat, folder) == 0
    index.write_text("{")
    result = moechat("show", str(folder))
    assert (result.code, result.stdout) == (3, "") and "[checkpoint-damaged]" in result.stderr


def test_a_single_file_of_any_name_counts(moechat, tmp_path):
    assert weights_bytes(moechat, own_folder(tmp_path, consolidated=7)) == 7


def test_the_architecture_is_the_one_that_is_computed(moechat, tmp_path):
    folder = own_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for names in ["Unknown", *config["architectures"]], [3, *config["architectures"]]:
        (folder / "config.json").write_text(json.dumps({**config, "architectures": names}))
        facts = json.loads(moechat("show", str(folder), "--json").stdout)
        assert facts["architecture"] == "DeepseekV3ForCausalLM"


def test_show_tells_what_the_probe_found(moechat):
    from moechat.engine.kv_choice import verdict_key
    from moechat.engine.model_files import find_model_files
    from moechat.kv.verdict import Verdict, store_verdict

    assert json.loads(moechat("show", "mini", "--json").stdout)["kv_probe"] is None
    assert "not probed: moechat eval probe mini\n" in moechat("show", "mini").stdout
    assert "kv_probe" not in json.loads(moechat("show", "deepseek-v3", "--json").stdout)
    verdict = Verdict(2, (True, False, True), (True,) * 3, 0.25, 1020, "2026-01-31")
    store_verdict(verdict_key(find_model_files(MINI)), verdict)
    shown = json.loads(moechat("show", "mini", "--json").stdout)["kv_probe"]
    assert shown == json.loads(json.dumps(verdict.keys())) and shown["kl_nats"] == 0.25
    assert f"KV probe {verdict.text}" in " ".join(moechat("show", "mini").stdout.split())
