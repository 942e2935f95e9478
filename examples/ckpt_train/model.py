"""A decoder-only GPT on bytes, with GPT-2's layout and initialisation."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from ckpt_component.config.hydra.hydra_errors import HydraConfigError

from .schema import Model

#: One token per byte.
VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention.

    Args:
        width: size of a token's vector
        heads: number of heads
        dropout: dropout of the output
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        # As in Megatron, q, k and v of a head are adjacent, so that tensor parallelism can distribute whole heads;
        # `qkv` then has only this rank's heads.
        q, k, v = self.qkv(x).view(batch, time, -1, 3, width // self.heads).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, -1)))
        return out


class GptBlock(nn.Module):
    """Attention and MLP, each with a preceding norm and a residual connection.

    Args:
        width: size of a token's vector
        heads: number of attention heads
        dropout: dropout of each branch's output
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attention(self.norm1(x))
        x = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")))
        return x


class Gpt(nn.Module):
    """The model. Head and embedding share their weight, one tensor under two names.

    Args:
        settings: size of the model

    Attributes:
        heads: number of attention heads per block

    Raises:
        CheckpointConfigError: the width is not divisible by the number of heads
    """

    def __init__(self, settings: Model) -> None:
        super().__init__()
        if settings.width % settings.heads:
            raise HydraConfigError(
                f"model.width={settings.width} cannot be shared out to model.heads={settings.heads}; "
                "use a width that is a multiple of heads."
            )
        width = settings.width
        self.heads = settings.heads
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(settings.context, width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(GptBlock(width, settings.heads, settings.dropout) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(settings.layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict the next bytes.

        Args:
            tokens: int64, (batch, time), from 0 to 255; time at most `context`

        Returns:
            Logits, (batch, time, 256).
        """
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self, layers: int) -> None:
        # Radford et al. 2019, section 2.3: weights of residual branches are scaled by the depth.
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue
            to_residual = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if to_residual else 0.02)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy in nats per byte, computed in float32."""
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
