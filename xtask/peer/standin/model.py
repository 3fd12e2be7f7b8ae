"""Stands in for the released model.py where that is not at hand: the same names, signatures and shapes, no architecture.

It lets `cargo xtask oracle official` run every line of tools/trace_official.py; its figures mean nothing.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

shared_attn = SimpleNamespace(index_k=None, candidates=None)


@dataclass
class ModelArgs:
    vocab_size: int = 0
    dim: int = 0
    n_layers: int = 0
    n_routed_experts: int = 0
    n_activated_experts: int = 0
    index_source_layers: tuple = ()
    candidate_source_layer: int = -1
    max_batch_size: int = 1
    max_seq_len: int = 0


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-20).to(x.dtype) * self.weight


class Indexer(nn.Module):
    def __init__(self, args, layer):
        super().__init__()
        self.owns_k, self.is_candidate_source = True, layer == args.candidate_source_layer
        self.k_cache = torch.zeros(args.max_batch_size, args.max_seq_len)

    def forward(self, x, q, start, keys, offset):
        batch, length = x.shape[:2]
        if self.is_candidate_source:
            shared_attn.candidates = torch.ones(batch, length, start + length, dtype=torch.bool)
        choice = torch.arange(4).expand(batch, length, 4)
        seen = torch.arange(start, start + length).view(1, -1, 1)
        return torch.where(choice <= seen, choice + offset, -1)


class Attention(nn.Module):
    def __init__(self, args, layer):
        super().__init__()
        self.indexer = Indexer(args, layer) if layer in args.index_source_layers else None

    def forward(self, x, start):
        if self.indexer is not None:
            self.indexer(x, None, start, None, 8)
        return x.cumsum(1) / x.shape[1]


class Gate(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(args.n_routed_experts, args.dim))
        self.count = args.n_activated_experts

    def forward(self, x):
        weights, chosen = (x.float() @ self.weight.float().T).sigmoid().topk(self.count)
        return weights, chosen


class Experts(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.gate = Gate(args)

    def forward(self, x):
        weights, _ = self.gate(x.flatten(0, 1))
        return x * weights.mean(-1).view(*x.shape[:2], 1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, args, layer):
        super().__init__()
        self.attn_norm, self.ffn_norm = Norm(args.dim), Norm(args.dim)
        self.attn, self.ffn, self.engram = Attention(args, layer), Experts(args), None

    def forward(self, streams, pre, start):
        collapsed = (streams * pre.unsqueeze(-1)).sum(2).to(streams.dtype)
        out = self.attn(self.attn_norm(collapsed), start)
        out = out + self.ffn(self.ffn_norm(collapsed + out))
        return streams + out.unsqueeze(2), pre


class Head(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(args.vocab_size, args.dim))

    def forward(self, x, full_logits=False):
        return (x if full_logits else x[:, -1:]).float() @ self.weight.float().T


class Transformer(nn.Module):
    def __init__(self, args, tokenizer):
        super().__init__()
        assert len(tokenizer) <= args.vocab_size
        self.embed = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args, layer) for layer in range(args.n_layers))
        self.norm, self.head = Norm(args.dim), Head(args)

    def forward(self, tokens, start_pos=0):
        streams = self.embed(tokens).unsqueeze(2).repeat(1, 1, 4, 1)
        pre = torch.full(streams.shape[:3], 0.25)
        for layer in self.layers:
            streams, pre = layer(streams, pre, start_pos)
        return None, self.head(self.norm(streams.mean(2)), full_logits=False), None
