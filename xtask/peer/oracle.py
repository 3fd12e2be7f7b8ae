"""Traces of a checkpoint folder by nemo_automodel (torch, CPU, float32), in the format of docs/trace.md.

    python oracle.py MODEL_DIR PROMPTS.jsonl OUT.safetensors [--lines 0 17 ...]

Every chosen line of PROMPTS.jsonl gives one pass: the prompt and its recorded answer, read in one prefill. The file comes
out the same, byte for byte, on the same build of torch and kind of processor: one thread, kernels of the least vectors.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["ATEN_CPU_CAPABILITY"] = "default"
os.environ["MKL_CBWR"] = "COMPATIBLE"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from torch_demo import load  # noqa: E402


class Recorder(torch.overrides.TorchFunctionMode):
    """Collects what the modules compute and changes none of it.

    Selection scores are not a module's output: they are what torch.topk is called with while an indexer runs.
    """

    def __init__(self, model):
        super().__init__()
        self.model, self.out, self.indexer, self.layer = model, {}, None, None
        from nemo_automodel.components.models.deepseek_v41 import attention

        # What a cache holds is no module's output either.
        self.plain, attention.quantize_cache = attention.quantize_cache, self.quantise
        for name, block in model.model.layers.items():
            self.watch(int(name), block)
        self.hook(model.model.norm, lambda _, out: self.put("final_hidden", out[0]))

    def watch(self, layer, block):
        def keep(name, of=lambda out: out[0]):
            return lambda _, out: self.put(f"layers.{layer}.{name}", of(out))

        def streams(_, out):
            self.put(f"layers.{layer}.streams", out[0][0])
            self.put(f"layers.{layer}.pre_mix", out[1][0])

        def mix(name):
            def take(_, out):
                for part in ("pre", "post", "comb"):
                    self.put(f"layers.{layer}.{name}.{part}", getattr(out, part)[0])
            return take

        def choice(_, out):
            self.put(f"layers.{layer}.router.weights", out[0])
            self.put(f"layers.{layer}.router.experts", out[1])

        def attention(_, out):
            self.put(f"layers.{layer}.attn_out", out.hidden_states[0])
            if out.state.topk_indices is not None:
                self.put(f"layers.{layer}.topk", out.state.topk_indices[0])

        block.register_forward_pre_hook(lambda *_: self.__dict__.update(layer=layer))
        self.hook(block, streams)
        self.hook(block.attn_hc, mix("hc_attn"))
        self.hook(block.ffn_hc, mix("hc_ffn"))
        self.hook(block.attn_norm, keep("attn_in"))
        self.hook(block.attn, attention)
        self.hook(block.ffn_norm, keep("ffn_in"))
        self.hook(block.ffn, keep("ffn_out"))
        self.hook(block.ffn.gate, choice)
        if block.attn.indexer is not None:
            block.attn.indexer.register_forward_pre_hook(lambda *_: self.enter(layer))
            self.hook(block.attn.indexer, lambda *_: self.enter(None))

    def hook(self, module, take):
        module.register_forward_hook(lambda _, args, out: take(args, out))

    def enter(self, layer):
        text = self.model.config.text_config
        # The candidate source chooses blocks first.
        self.indexer, self.blocks = layer, layer == text.candidate_source_layer_id

    def quantise(self, values, *, format, block_size):
        out = self.plain(values, format=format, block_size=block_size)
        name = {"fp8": "window_kv", "nvfp4": "compress_kv", "mxfp4": None if values.ndim == 4 else "index_k"}[format]
        if name:
            self.put(f"layers.{self.layer}.{name}", out[0])
        return out

    def put(self, name, value):
        value = value.detach()
        self.out[name] = (value.to(torch.int32) if value.dtype == torch.int64 else value.float()).clone().contiguous()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.indexer is not None and func in (torch.topk, torch.Tensor.topk):
            if not self.blocks:
                self.put(f"layers.{self.indexer}.index_scores", args[0].detach().flatten(0, -2))
            self.blocks = False
        return func(*args, **(kwargs or {}))

    @torch.inference_mode()
    def run(self, ids):
        self.out = {}
        with self:
            logits = self.model(torch.tensor([ids])).logits
        self.put("logits", logits[0])
        self.put("tokens", torch.tensor(ids))
        return self.out


def tokens_digest(tensors):
    sha = hashlib.sha256()
    for name in sorted(n for n in tensors if n.endswith("/tokens")):
        sha.update(name[: -len("/tokens")].encode() + b"\0" + tensors[name].numpy().astype("<u4").tobytes())
    return sha.hexdigest()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model", type=Path)
    ap.add_argument("prompts", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--lines", type=int, nargs="+", default=[0])
    args = ap.parse_args()
    torch.set_num_threads(1)
    model, _ = load(args.model)
    recorder = Recorder(model)
    cases = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    tensors = {}
    for line in args.lines:
        case = cases[line]
        ids = case["prompt_ids"] + case["float32"]["ids"][:-1]
        tensors |= {f"prompt{len(ids)}/{name}": value for name, value in recorder.run(ids).items()}
    header = {
        "version": 1,
        "engine": f"nemo_automodel {importlib.metadata.version('nemo-automodel')}, torch {torch.__version__}",
        "model": args.model.name,
        "numerics": "exact",
        "device": "cpu",
        "tokens_sha256": tokens_digest(tensors),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(args.out), metadata={"hallmark.trace": json.dumps(header)})
    print(f"{args.out.name}: {len(tensors)} tensors")


if __name__ == "__main__":
    main()
