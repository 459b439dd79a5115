"""The cuts of synthetic_gguf.py in moechat's own formats: every linear layer, the head included.

    python docs/benchmarks/synthetic_folder.py FOLDER [--cut a|b] [--format fp8|int4]

Writes FOLDER/CUT-FORMAT, all four unless told which, for compare_llama_bench.py --moechat-folder:
as many layers, experts and words as the GGUF file has. The embedding, of which a token reads a row,
and the router are BF16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf_cuts import VOCABULARY
from pipe import run

from moechat.bench.settings import model_entry
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.folder import write_model
from moechat.bench.synthetic.tensors import FORMATS, Recipe

# Each cut's model in models.toml, and the layers with experts and the experts that it keeps.
CUTS = {"a": ("qwen3-30b-a3b", 6, 128), "b": ("deepseek-v3", 2, 64)}


def main() -> None:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cut", choices=CUTS, action="append")
    parser.add_argument("--format", choices=["fp8", "int4"], action="append")
    arguments = parser.parse_args()
    for cut in arguments.cut or CUTS:
        name, layers, experts = CUTS[cut]
        whole = Shape.of_entry(name, model_entry(name))
        shape = whole.cut(dense_layers=0, moe_layers=layers, experts=experts, vocab=VOCABULARY)
        for format in arguments.format or ["fp8", "int4"]:
            precisions = dict.fromkeys(("linear", "experts", "head"), FORMATS[format])
            path = arguments.folder / f"{cut}-{format}"
            path.mkdir(parents=True)
            write_model(path, shape, Recipe(precisions, format), lambda done, total: None)
            print(path)


if __name__ == "__main__":
    run(main)
