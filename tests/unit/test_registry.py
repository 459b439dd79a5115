import hashlib
import json
import os
import subprocess
import sys

import pytest
from oracles import MINI

from moechat.errors import ModelNotFound, Usage
from moechat.models.architectures import load_spec, read_spec, tensor_table
from moechat.models.geometry import geometry
from moechat.registry import load_registry

# DeepSeek-V3's config.json where it differs from mini's.
V3 = {
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    """The user's models.toml, absent at first, in a home of its own."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    (tmp_path / "home/config").mkdir(parents=True)
    return tmp_path / "home/config/models.toml"


def not_found(name):
    with pytest.raises(ModelNotFound) as caught:
        load_registry().resolve(name)
    assert caught.value.exit_code == 3
    return caught.value.message


def test_mini_resolves_to_the_files_in_the_package():
    model = load_registry().resolve("mini")
    assert (model.name, model.path) == ("mini", MINI)
    assert model.entry["limits"]["context_tokens"] == 4096


def test_minis_files_are_as_the_entry_says():
    entry = load_registry().entries["mini"]
    assert len(entry["files"]) == 8
    for file in entry["files"]:
        content = (MINI / file["name"]).read_bytes()
        assert len(content) == file["size_bytes"]
        assert hashlib.sha256(content).hexdigest() == file["sha256"]


def test_minis_entry_agrees_with_its_configs():
    entry, spec = load_registry().entries["mini"], load_spec(MINI)
    config = json.loads((MINI / "config.json").read_text())
    assert [entry["architecture"]] == config["architectures"]
    assert entry["limits"]["context_tokens"] == spec.context_tokens
    assert tuple(entry["chat"]["stop_ids"]) == spec.end_ids
    dimensions = geometry(spec)
    assert entry["geometry"] == {key: dimensions[key] for key in entry["geometry"]}


def test_deepseek_v3s_size_follows_from_its_geometry():
    entry = load_registry().entries["deepseek-v3"]
    config = json.loads((MINI / "config.json").read_text()) | V3
    spec = read_spec(config, {})
    dimensions = geometry(spec)
    assert entry["geometry"] == {key: dimensions[key] for key in entry["geometry"]}
    unquantised = ("embedding", "head", "router", "router_correction")

    def stored_bytes(row):
        elements = row.shape[0] * (row.shape[1] if len(row.shape) == 2 else 1)
        if len(row.shape) == 2 and not row.role.endswith(unquantised):
            return elements + 4 * -(-row.shape[0] // 128) * -(-row.shape[1] // 128)
        return elements * (4 if row.role.endswith("router_correction") else 2)

    table = tensor_table(spec, config)
    model_bytes = sum(map(stored_bytes, table))
    last_layer = sum(stored_bytes(row) for row in table if row.role.startswith("layers.60."))
    hidden, vocab = spec.hidden_size, spec.vocab_size
    mtp_bytes = last_layer + 2 * (2 * vocab * hidden + 2 * hidden * hidden + 3 * hidden)
    assert entry["size_bytes"] == model_bytes + mtp_bytes


def test_a_folder_resolves_to_itself_also_relative_or_with_a_tilde(tmp_path, monkeypatch):
    (tmp_path / "mini").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("./mini", "mini/", str(tmp_path / "mini"), "~/mini"):
        model = load_registry().resolve(text)
        assert (model.name, model.path, model.entry) == ("mini", tmp_path / "mini", None)
    assert load_registry().resolve("mini").path == MINI


def test_a_name_close_to_a_known_one_is_suggested():
    message = not_found("Minni")
    assert "'Minni'" in message and "did you mean mini?" in message
    assert "deepseek-v3" in message and "moechat run" not in message  # whoever asked
    assert "did you mean deepseek-v3 or " in not_found("deepseek_v3")


@pytest.mark.parametrize(
    "text", ["", "a\0b", "What is the capital of Norway?", "w" * 100_000, "\x1b[2J", "no/such"]
)
def test_anything_else_is_one_clear_line(text):
    message = not_found(text)
    assert "no " in message and "did you mean" not in message
    assert "\n" not in message and "\x1b" not in message and len(message) < 400


def test_a_gguf_file_is_a_model_by_its_name_or_its_first_bytes(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"damaged")
    (tmp_path / "blob").write_bytes(b"GGUF....")
    for file, name in (("m.gguf", "m"), ("blob", "blob")):
        model = load_registry().resolve(str(tmp_path / file))
        assert (model.name, model.path, model.entry) == (name, tmp_path / file, None)


def test_another_file_is_not_a_model(tmp_path):
    (tmp_path / "m.bin").write_bytes(b"PK")
    assert "is no GGUF file" in not_found(str(tmp_path / "m.bin"))


def test_a_model_without_weights_says_size_repository_and_what_to_do(own_file):
    message = not_found("deepseek-v3")
    assert "689 GB" in message and "deepseek-ai/DeepSeek-V3" in message
    assert "give /path/to/folder" in message and str(own_file) in message


@pytest.mark.parametrize("relative", [False, True])
def test_the_users_file_points_at_a_folder(own_file, tmp_path, relative):
    folder = tmp_path / "home/config/v3" if relative else tmp_path / "weights"
    folder.mkdir()
    own_file.write_text(f'[deepseek-v3]\nfolder = "{"v3" if relative else folder}"\n')
    model = load_registry().resolve("deepseek-v3")
    assert model.path == folder
    assert model.entry["geometry"]["num_layers"] == 61


def test_a_folder_in_the_users_file_must_exist(own_file):
    own_file.write_text('[deepseek-v3]\nfolder = "/nowhere/v3"\n')
    assert "/nowhere/v3" in not_found("deepseek-v3")


def test_the_users_file_overlays_field_by_field_and_adds_models(own_file, tmp_path):
    own_file.write_text(
        f'[mini.defaults]\ntemperature = 0.1\n[mine]\nfolder = "{tmp_path}"\n', encoding="utf-8"
    )
    registry = load_registry()
    assert registry.entries["mini"]["defaults"] == {"temperature": 0.1, "top_p": 0.95}
    assert registry.resolve("mine").path == tmp_path
    assert registry.local_folder("deepseek-v3") is None


@pytest.mark.parametrize(
    "text",
    [
        b"[mini",
        b"\xff\xfe",
        b"mini = 3",
        b"[mini]\nfolder = 3",
        b"[mini]\nsource = 'x'",
        b"[mini.source]\npackage_data = 3",
    ],
)
def test_a_broken_users_file_is_a_usage_error_that_names_it(own_file, text):
    own_file.write_bytes(text)
    with pytest.raises(Usage) as caught:
        load_registry()
    assert str(own_file) in caught.value.what and caught.value.why


def test_an_installed_package_reads_the_models_toml_beside_it(tmp_path):
    package = tmp_path / "moechat"
    package.mkdir()
    source = MINI.parents[1]
    for name in ("registry.py", "folders.py", "gguf_magic.py", "errors.py"):
        (package / name).write_bytes((source / name).read_bytes())
    (package / "__init__.py").write_text("")
    (package / "models.toml").write_text("[installed]\n")
    (tmp_path / "models.toml").write_text("[source]\n")
    code = "from moechat.registry import load_registry as r; print(*r().entries)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert run.stdout == "installed\n", run.stderr


def test_a_name_with_dots_is_quoted_where_it_is_a_table():
    assert 'under ["glm-4.6"] in ' in not_found("glm-4.6")
    assert "under [kimi-k2] in " in not_found("kimi-k2")
