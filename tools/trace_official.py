#!/usr/bin/env python3
"""Trace of a checkpoint by DeepSeek's released inference code, in the format of docs/trace.md.

    python trace_official.py --code DIR --model DIR --out FILE --ids 0,17,5 [--ids ...] [--decode N]
                             [--device cuda] [--numerics source] [--nudge P,E]

--code is a folder with the released `model.py` and what it imports (`engram.py`, `vision.py`, `kernel.py`, ...), none of
which is part of this repository. `kernel.py` may be any module with the same functions: the released one needs an NVIDIA
GPU, ports to torch run anywhere; --numerics is only the word that the header says about it. --model is a folder in the
released layout. Every --ids gives a pass `promptN`; --decode adds greedy steps behind the first. --nudge moves element E of
the embedding of the token at position P by one unit in the last place: with it the second trace for `judge --noise` is
made. Nothing of the model is changed otherwise, but one thing: on a decode step that leaves a group of compressed entries
open, an index source scores against its own keys (the released code takes those that another layer published last).

Needs torch, transformers, safetensors and numpy.
"""

import argparse
import hashlib
import importlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Names of `ModelArgs` and of the checkpoint's configuration, where they differ.
TEXT = {
    "dim": "hidden_size", "moe_inter_dim": "moe_intermediate_size", "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers", "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok", "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor", "rope_head_dim": "qk_rope_head_dim", "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window", "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids", "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id", "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
VISION = {
    "n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads",
    "inter_dim": "intermediate_size", "max_n_token": "max_image_tokens",
}


def arguments(config, fields, longest):
    """The released `ModelArgs` of a checkpoint's config.json; only fields that the class has."""
    text, vision = config["text_config"], config.get("vision_config", {})
    out = {}
    for name in fields:
        if name.startswith("vision_"):
            short = name.removeprefix("vision_")
            value = vision.get(VISION.get(short, short))
        else:
            value = text.get(TEXT.get(name, name))
        if value is not None:
            out[name] = tuple(value) if isinstance(value, list) else value
    yarn = text["rope_scaling"]
    fixed = {
        "original_seq_len": yarn["original_max_position_embeddings"], "rope_factor": yarn["factor"],
        "beta_fast": yarn["beta_fast"], "beta_slow": yarn["beta_slow"], "image_token_id": config["image_token_id"],
        "dtype": "fp8", "expert_dtype": "fp4", "max_batch_size": 1, "max_seq_len": longest, "temperature": 0,
    }
    return out | {name: value for name, value in fixed.items() if name in fields}


def decoded(weight, scale):
    """An fp8 matrix with a scale for every 32 x 32 block as float32."""
    rows, cols = weight.shape
    return weight.float() * scale.float().repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :cols]


def load(code, folder, longest, device):
    """The released Transformer with the folder's weights."""
    from transformers import PreTrainedTokenizerFast

    sys.path.insert(0, str(code))
    released = importlib.import_module("model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields = set(released.ModelArgs.__dataclass_fields__)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    net = released.Transformer(released.ModelArgs(**arguments(config, fields, longest)), tokenizer)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    # One shard in memory at a time: a weight and its scale may lie in different ones, so scales are kept.
    waiting, scales, left = dict(net.named_parameters()), {}, {}
    for shard in sorted(set(index.values())):
        for name, value in load_file(str(folder / shard)).items():
            if name.endswith(".attn.wo_a.scale"):
                scales[name] = value
            elif name.endswith(".attn.wo_a.weight"):
                left[name] = value
            elif name in waiting:
                fill(name, waiting.pop(name), value)
    for name, value in left.items():
        # The released code keeps this matrix in bf16.
        if name in waiting:
            fill(name, waiting.pop(name), decoded(value, scales[name.removesuffix("weight") + "scale"]))
    # The drafts share embedding and head with the model.
    missing = [n for n in waiting if not (n.startswith("mtp.") and n.endswith((".embed.weight", ".head.weight")))]
    if missing:
        sys.exit(f"{folder}: has no tensor for the released parameters {sorted(missing)[:5]}")
    return net.eval(), released


def fill(name, parameter, value):
    if value.dtype == torch.int8:
        value = value.view(getattr(torch, "float4_e2m1fn_x2", torch.int8))
    elif value.dtype not in (torch.float8_e4m3fn, getattr(torch, "float8_e8m0fnu", None)):
        value = value.to(parameter.dtype)
    if value.shape != parameter.shape:
        sys.exit(f"{name}: has shape {tuple(value.shape)}, the released code wants {tuple(parameter.shape)}")
    parameter.requires_grad_(False)
    parameter.data = value.to(parameter.device)


class Recorder:
    """Hooks that copy what the modules give."""

    def __init__(self, net, released):
        self.net, self.released, self.out = net, released, {}
        for layer, block in enumerate(net.layers):
            self.watch(f"layers.{layer}.", block)
        self.hook(net.norm, lambda _, out: self.put("final_hidden", out[0]))
        net.head.register_forward_pre_hook(lambda _, args, kw: (args, kw | {"full_logits": True}), with_kwargs=True)

    def watch(self, at, block):
        def keep(name):
            return lambda _, out: self.put(at + name, out[0])

        def streams(_, out):
            self.put(at + "streams", out[0][0])
            self.put(at + "pre_mix", out[1][0])

        def choice(_, out):  # rows of all sequences together
            self.put(at + "router.weights", out[0])
            self.put(at + "router.experts", out[1])

        self.hook(block, streams)
        for name, module in (("attn_in", block.attn_norm), ("ffn_in", block.ffn_norm),
                             ("attn_out", block.attn), ("ffn_out", block.ffn)):
            self.hook(module, keep(name))
        self.hook(block.ffn.gate, choice)
        indexer = getattr(block.attn, "indexer", None)
        if indexer is not None:
            indexer.register_forward_pre_hook(self.own_keys)
            self.hook(indexer, lambda args, out: self.selection(at, indexer, args, out))
        engram = getattr(block, "engram", None)
        if engram is not None:
            self.hook(engram, lambda args, _: self.put(at + "engram.hash_ids", args[1][0]))
            self.hook(engram.wkv, lambda args, out: self.put(at + "engram.kv_in", args[0][0]))
            self.hook(engram.wkv, lambda args, out: self.put(at + "engram.value", out[0][..., -engram.dim:]))

    def hook(self, module, take):
        def hooked(_, args, out):
            take(args, out)  # a hook that returned something would replace the output

        module.register_forward_hook(hooked)

    def own_keys(self, module, _):
        if getattr(module, "owns_k", False):
            self.released.shared_attn.index_k = module.k_cache

    def selection(self, at, module, args, out):
        # Entries stand behind the window's keys.
        self.put(at + "topk", torch.where(out >= 0, out - args[4], -1)[0])
        if module.is_candidate_source:
            self.put(at + "candidates", self.released.shared_attn.candidates[0])

    def put(self, name, value):
        value = value.detach().cpu()
        whole = value.dtype in (torch.int64, torch.int32, torch.bool)
        self.out[name] = value.to(torch.int32 if whole else torch.float32).clone().contiguous()

    @torch.inference_mode()
    def run(self, ids, start=0):
        self.out = {}
        for cached in ("get_window_topk_idxs", "get_dspark_topk_idxs"):
            if hasattr(getattr(self.released, cached, None), "cache_clear"):
                getattr(self.released, cached).cache_clear()
        logits = self.net(torch.tensor([ids]), start)[1]
        self.put("logits", logits[0] if logits.dim() == 3 else logits)
        return self.out


def decode(recorder, prompt, steps):
    """Greedy steps behind a prompt as one pass: row i of the logits chose token N + i."""
    out = recorder.run(prompt)
    ids, rows, finals, picks = list(prompt), [out["logits"][-1]], [out["final_hidden"][-1]], {}
    for _ in range(steps - 1):
        ids.append(int(rows[-1].argmax()))
        out = recorder.run([ids[-1]], len(ids) - 1)
        rows.append(out["logits"][-1])
        finals.append(out["final_hidden"][-1])
        for name, value in out.items():
            if name.endswith((".topk", "router.experts")):
                picks.setdefault(name, []).append(value.flatten())
    ids.append(int(rows[-1].argmax()))
    tensors = {"tokens": torch.tensor(ids, dtype=torch.int32, device="cpu")}
    tensors |= {"logits": torch.stack(rows), "final_hidden": torch.stack(finals)}
    for name, values in picks.items():
        width = max(len(v) for v in values)
        padded = [torch.nn.functional.pad(v, (0, width - len(v)), value=-1) for v in values]
        tensors[name] = torch.stack(padded)
    return tensors


def nudge(net, token, element):
    """Moves an element of a token's embedding by one unit in the last place of bf16, away from zero."""
    row = net.embed.weight.data[token]
    bits = row.view(torch.int16) if row.dtype == torch.bfloat16 else row.view(torch.int32)
    bits[element] += 1


def main():
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("--code", type=Path, required=True)
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--ids", action="append", required=True, type=lambda s: [int(i) for i in s.split(",")])
    ap.add_argument("--decode", type=int, default=0)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--numerics", default="source")
    ap.add_argument("--nudge", type=lambda s: [int(i) for i in s.split(",")])
    ap.add_argument("--longest", type=int, default=256, help="tokens that the caches hold")
    args = ap.parse_args()
    if max(map(len, args.ids)) + args.decode > args.longest:
        sys.exit("--longest is shorter than a pass")
    torch.set_num_threads(1)  # so that a trace comes out the same again
    net, released = load(args.code, args.model, args.longest, args.device)
    if args.nudge:
        nudge(net, args.ids[0][args.nudge[0]], args.nudge[1])
    recorder, tensors = Recorder(net, released), {}
    for ids in args.ids:
        values = recorder.run(ids) | {"tokens": torch.tensor(ids, dtype=torch.int32, device="cpu")}
        tensors |= {f"prompt{len(ids)}/{name}": value for name, value in values.items()}
    if args.decode:
        values = decode(recorder, args.ids[0], args.decode)
        tensors |= {f"decode/{name}": value for name, value in values.items()}
    sha = hashlib.sha256()
    for name in sorted(n for n in tensors if n.endswith("/tokens")):
        sha.update(name[: -len("/tokens")].encode() + b"\0" + tensors[name].numpy().astype("<u4").tobytes())
    source = hashlib.sha256((args.code / "model.py").read_bytes()).hexdigest()
    header = {
        "version": 1, "engine": f"model.py {source[:12]}, torch {torch.__version__}", "model": args.model.name,
        "numerics": args.numerics, "device": args.device, "tokens_sha256": sha.hexdigest(),
        "perturbation": f"one ulp of embedding element {args.nudge[1]}" if args.nudge else "",
    }
    save_file(tensors, str(args.out), metadata={"hallmark.trace": json.dumps(header)})
    print(f"{args.out.name}: {len(tensors)} tensors")


if __name__ == "__main__":
    main()
