"""Oracle folders through llama.cpp's own converter, then through moechat in exact mode.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    python -m venv converter
    converter/bin/pip install "torch>=2.6,<2.14" transformers==4.57.6 numpy sentencepiece protobuf
    python docs/benchmarks/convert_oracles.py llama_cpp_python-0.3.36/vendor/llama.cpp \
        --python converter/bin/python [FOLDER ...]

Needs moechat here and the converter's packages there. Each folder of tests/fixtures/oracle is
converted to F32 and to BF16 by convert_hf_to_gguf.py as it is; only its vocabulary step is
replaced, since the folders have no tokenizer: made-up tokens, and the ids of config.json.

The converter drops three settings that the real models of a kind share, and these tiny ones do
not. A row "... stated" is the same with those written into the file as well.

A row holds the largest difference of logits from transformers' in float32 (last position of three
prompts, all positions of one) and whether the three greedy continuations of 24 tokens are equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TYPES = ("f32", "bf16")
BOUND = 1e-3
REPOSITORY = Path(__file__).resolve().parents[2]


def _dropped(config: dict[str, Any]) -> dict[str, float | list[bool]]:
    """What the converter leaves out: the scale of Gemma's scores, its pattern, a window."""
    kind, keys = config["model_type"], {}
    if kind.startswith("gemma"):
        keys["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
    if "sliding_window_pattern" in config:
        period = config["sliding_window_pattern"]
        slides = [bool((layer + 1) % period) for layer in range(config["num_hidden_layers"])]
        keys["attention.sliding_window_pattern"] = slides
    if kind == "mistral" and config["sliding_window"]:
        keys["attention.sliding_window"] = config["sliding_window"]
    return keys


def convert(tree: Path, folder: Path, target: Path, type_: str, stated: bool) -> None:
    """Run the converter of ``tree`` in this process; for the interpreter that has its packages."""
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    import convert_hf_to_gguf as converter  # type: ignore[import-not-found]

    config = json.loads((folder / "config.json").read_text())
    found = converter.get_model_class

    def set_vocab(model: Any) -> None:
        writer, size = model.gguf_writer, config["vocab_size"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(["a", "b", "ab", *(f"<{token}>" for token in range(3, size))])
        writer.add_token_types([1] * size)
        writer.add_token_merges(["a b"])
        ends = config.get("eos_token_id")
        writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
        for key, value in _dropped(config).items() if stated else ():
            add = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
            add[type(value)](f"{writer.arch}.{key}", value)

    def with_made_up_vocabulary(*arguments: Any, **options: Any) -> Any:
        model_class = found(*arguments, **options)
        model_class.set_vocab = set_vocab
        return model_class

    converter.get_model_class = with_made_up_vocabulary
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(target), "--outtype", type_]
    converter.main()


def prepared(folder: Path, target: Path) -> Path:
    """The folder by links, with a tokenizer.json of the right size: Gemma's class counts it."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary = {f"<{token}>": token for token in range(size)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


def compare(file: Path, folder: Path) -> tuple[float, bool]:
    """Largest difference of exact-mode logits, and whether all greedy tokens are equal."""
    import numpy as np

    from moechat import Engine, SamplingParams

    want = dict(np.load(folder / "expected.npz"))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_end=True)
    difference, equal = 0.0, True
    with Engine.open(file, compute="exact", threads=2) as engine:
        for prompt in range(3):
            ids = want[f"prompt_{prompt}_ids"].tolist()
            logits = engine.session().extend(ids)
            assert logits is not None
            pairs = [(logits[-1], want[f"prompt_{prompt}_last_logits"])]
            if prompt == 1:
                pairs.append((logits, want["all_logits"]))
            difference = max([difference, *(float(np.abs(a - b).max()) for a, b in pairs)])
            events = engine.session().generate(ids, params)
            tokens = [event.token_id for event in events if event.token_id is not None]
            equal = equal and tokens == want[f"prompt_{prompt}_greedy"].tolist()
    return difference, equal


def row(folder: Path, links: Path, tree: Path, python: str, stated: bool) -> str:
    """One line of the table: converted and compared in both types."""
    name, cells = f"{folder.name}{' stated' if stated else ''}", []
    for type_ in TYPES:
        target = links.parent / f"{name.replace(' ', '-')}-{type_}.gguf"
        command = [python, __file__, str(tree), "--convert", str(links), str(target), type_]
        command += ["--stated"] if stated else []
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            return f"{name:27}refused: {run.stderr.strip().splitlines()[-1]}"
        try:
            difference, equal = compare(target, folder)
        except Exception as error:
            return f"{name:27}accepted; moechat: {error!r}"
        cells.append(f"{difference:9.1e}{'' if difference <= BOUND else ' !':3}{equal!s:8}")
    return f"{name:27}yes      {''.join(cells)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="vendor/llama.cpp of the unpacked sdist")
    parser.add_argument("names", nargs="*", metavar="FOLDER")
    parser.add_argument("--python", default=sys.executable, help="has the converter's packages")
    parser.add_argument("--keep", type=Path, help="folder to leave the GGUF files in")
    parser.add_argument("--stated", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.convert:
        folder, target, type_ = arguments.convert
        convert(arguments.tree, Path(folder), Path(target), type_, arguments.stated)
        return
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
    from oracles import ORACLE_NAMES, oracle_folder  # type: ignore[import-not-found]

    print(f"{'folder':27}accepted {'F32':>9}   {'greedy':8}{'BF16':>9}   greedy")
    with tempfile.TemporaryDirectory() as scratch:
        place = arguments.keep or Path(scratch)
        for name in arguments.names or ORACLE_NAMES:
            folder = oracle_folder(name)
            links = prepared(folder, place / name)
            dropped = _dropped(json.loads((folder / "config.json").read_text()))
            for stated in (False, True) if dropped else (False,):
                print(row(folder, links, arguments.tree, arguments.python, stated))


if __name__ == "__main__":
    main()
