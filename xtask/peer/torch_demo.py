"""Speed of the torch peer (nemo_automodel) on a checkpoint folder, CPU, float32: one JSON document on stdout.

    python torch_demo.py MODEL_DIR [--tokens 512] [--runs 5] [--threads 1 2]

The peer has no decoding cache, so its decode is a prefill of the whole context for every new token.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

# The package compiles one activation with torch.compile. On the CPU that costs a C++ build and made no call faster,
# so the peer runs eagerly; `--compile` leaves it on.
if "--compile" not in sys.argv:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


def load(folder):
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from transformers import PreTrainedTokenizerFast

    raw = json.loads((folder / "config.json").read_text())
    vocab = raw["text_config"]["vocab_size"]
    raw["dtype"] = raw["text_config"]["dtype"] = "float32"
    for key in ("architectures", "model_type", "transformers_version"):
        raw.pop(key, None)
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch",
        enable_hf_state_dict_adapter=True,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = DeepseekV41ForCausalLM(DeepseekV41Config(**raw), backend=backend, tokenizer=tokenizer)
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(str(shard)))
    tensors = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    missing, unexpected = model.load_state_dict(model.state_dict_adapter.from_hf(tensors), strict=False)
    if missing or unexpected:
        sys.exit(f"{folder}: the peer misses {missing} and does not know {unexpected}")
    return model.eval(), vocab


def prompt(length, vocab):
    """Token ids that depend on the position alone: BOS, then ordinary tokens spread over the vocabulary."""
    return [0] + [3 + (i * 7919) % (vocab * 3 // 4) for i in range(1, length)]


@torch.inference_mode()
def seconds(model, ids, runs):
    batch = torch.tensor([ids])
    model(batch)  # warm-up: allocation and the choice of kernels
    out = []
    for _ in range(runs):
        start = time.perf_counter()
        model(batch)
        out.append(time.perf_counter() - start)
    return out


def rate(tokens, times):
    """Tokens per second of every run, summed up."""
    rates = [tokens / t for t in times]
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "runs": len(rates)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model", type=Path)
    ap.add_argument("--tokens", type=int, default=512, help="prompt length of the prefill")
    ap.add_argument("--contexts", type=int, nargs="*", default=[64, 128], help="context lengths of the decode")
    ap.add_argument("--runs", type=int, default=5)
    ap.add_argument("--threads", type=int, nargs="*", help="thread counts (default: 1 and all cores)")
    ap.add_argument("--compile", action="store_true", help="leave torch.compile on")
    args = ap.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model, vocab = load(args.model)
    results = []
    for threads in args.threads or sorted({1, cores}):
        torch.set_num_threads(threads)
        times = seconds(model, prompt(args.tokens, vocab), args.runs)
        entry = {
            "threads": threads,
            "prefill": {"tokens": args.tokens, "seconds": times, "tokens_per_second": rate(args.tokens, times)},
            "decode": [],
        }
        for context in args.contexts:
            times = seconds(model, prompt(context, vocab), args.runs)
            entry["decode"].append({"context": context, "seconds": times, "tokens_per_second": rate(1, times)})
        results.append(entry)
    import importlib.metadata as metadata

    names = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    versions = {name: metadata.version(name) for name in names}
    versions["nemo_automodel"] = metadata.version("nemo-automodel")
    versions["python"] = platform.python_version()
    json.dump(
        {
            "peer": "nemo_automodel",
            "dtype": "float32",
            "compile": args.compile,
            "cores": cores,
            "versions": versions,
            "blas": "mkl" if torch.backends.mkl.is_available() else "other",
            "results": results,
        },
        sys.stdout,
        indent=1,
    )
    print()


if __name__ == "__main__":
    main()
