"""A small GPT in the style of current language models.

Root-mean-square normalisation before every layer, rotary positions, normalised queries and keys, a
squared-ReLU MLP, no biases, input embedding and output layer tied. Attention is an argument, so
that the same weights run on any implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# Causal self-attention: q, k, v of shape (batch, seqlen, heads, head_dim) -> the same shape.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This package's attention: CUDA kernels for CUDA tensors, the CPU backend for CPU tensors."""
    from flash_attn_cuda import flash_attn_func

    return flash_attn_func(q, k, v, causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's scaled_dot_product_attention, with the kernel torch picks by itself."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sdpa_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention as separate matrix products: the same maths, rounded in another order."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v)


def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v)


ATTENTIONS: dict[str, Attention] = {
    "ours": ours,
    "sdpa": sdpa,
    "sdpa-math": sdpa_math,
    "sdpa-flash": sdpa_flash,
    "sdpa-cudnn": sdpa_cudnn,
}


@dataclass(frozen=True)
class GPTConfig:
    layers: int
    width: int
    heads: int
    seqlen: int
    vocab_size: int = 256  # bytes

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class SelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        # A head's q, k and v are neighbours, so that a part of the columns is a part of the heads.
        self.shape = (config.heads, 3, config.head_dim)
        self.attention = attention
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, self.shape).unbind(-2)  # each (B, S, H, D)
        q, k = (rotate(normalise(t), cos, sin).to(v.dtype) for t in (q, k))
        return self.project(self.attention(q, k, v).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.project = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.relu(self.expand(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.attention = SelfAttention(config, attention)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(normalise(x), cos, sin)
        return x + self.mlp(normalise(x))


class AttentionModel(nn.Module):
    """A model whose blocks have an `attention` layer each, which runs on an `attention`."""

    blocks: nn.ModuleList

    @contextmanager
    def using(self, attention: Attention) -> Iterator[None]:
        """Inside the block every layer runs on `attention`."""
        layers = [block.attention for block in self.blocks]
        before = [layer.attention for layer in layers]
        for layer in layers:
            layer.attention = attention
        try:
            yield
        finally:
            for layer, previous in zip(layers, before, strict=True):
                layer.attention = previous


class GPT(AttentionModel):
    """Next-byte predictor: token ids (B, S) -> logits (B, S, vocab_size)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, attention: Attention = ours) -> None:
        super().__init__()
        if config.width % config.heads or config.head_dim % 2:
            raise ValueError(
                f"width must be an even multiple of heads, got width {config.width} and "
                f"heads {config.heads}"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        cos, sin = rotary_tables(config.seqlen, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Normal weights, smaller for layers that add to the residual stream of a deep model."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        residual_std = 0.5 * (2 * self.config.layers * self.config.width) ** -0.5
        for name, weight in self.blocks.named_parameters():
            is_residual = name.endswith("project.weight")
            nn.init.normal_(weight, std=residual_std if is_residual else self.config.width**-0.5)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """positions: (S,) places of the tokens in their sequences; None: 0, 1, 2 and so on."""
        x = normalise(self.embedding(tokens))
        rows = slice(tokens.shape[1]) if positions is None else positions
        cos, sin = self.cos[rows], self.sin[rows]
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(normalise(x), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats per byte."""
        return F.cross_entropy(self(tokens, positions).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float = 0.7, seed: int = 0
    ) -> bytes:
        """`prompt` and `length` sampled bytes, each from the last `seqlen` bytes, recomputed."""
        device = self.embedding.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor(list(prompt), device=device)[None]
        for _ in range(length):
            logits = self(tokens[:, -self.config.seqlen :])[:, -1].float()
            probabilities = (logits / temperature).softmax(-1)
            tokens = torch.cat(
                [tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1
            )
        return bytes(tokens[0].tolist())


# The order of the columns of SelfAttention.qkv; weights of another order load without a word.
COLUMNS = "heads, qkv, head_dim"


def save_model(model: GPT, path: Path) -> None:
    weights = model.state_dict()
    torch.save({"config": asdict(model.config), "columns": COLUMNS, "weights": weights}, path)


def load_model(path: Path, device: torch.device) -> GPT:
    """The model that save_model wrote; reads tensors, numbers and texts only, no code.

    ValueError: its columns are in another order, as before this order had a name.
    """
    saved = torch.load(path, map_location=device, weights_only=True)
    if (found := saved.get("columns")) != COLUMNS:
        raise ValueError(
            f"{path}: the columns of qkv must be in the order {COLUMNS!r}, got {found!r}: train it "
            "again"
        )
    model = GPT(GPTConfig(**saved["config"])).to(device)
    model.load_state_dict(saved["weights"])
    return model


def normalise(x: Tensor) -> Tensor:
    """Root-mean-square normalisation over the last dimension, without learned gains."""
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


def rotary_tables(seqlen: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin, each (seqlen, 1, head_dim / 2): RoFormer (Su et al., 2021), section 3.2.2."""
    frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(seqlen, dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[d], x[d + D/2]) of x (B, S, H, D) by their position's angles."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)
