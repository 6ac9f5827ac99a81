"""The small heads on the backbone: the sequential head (paper section 3.2) and the confidence head (section 3.3)."""

from __future__ import annotations

import torch
from torch import nn

from .configuration_dspark import BlockDrafterConfig


class SequentialHead(nn.Module):
    r"""
    Lets each slot see the token drafted before it: a transition bias `B_k` added to the slot's base logits.

    With `e = W1[x_{k-1}]` and the backbone's normed hidden state `h_k`, the bias is `W2 f_k`, where

    - vanilla: `f_k = e`
    - gated: `f_k = sigmoid(W_gate [h_k ; e] + b) * e`
    - rnn: `[g ; c ; o] = W [s_{k-1} ; e ; h_k] + b`, `f_k = tanh(o)`,
      `s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c)`, `s_0 = 0`.

    `W1` covers the full vocabulary, `W2` the draft vocabulary. Parameter names are those of the released checkpoints.
    """

    def __init__(self, config: BlockDrafterConfig):
        super().__init__()
        rank, hidden_size = config.markov_rank, config.hidden_size
        self.head_type = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.logits_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(
        self, previous_ids: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        One slot.

        Args:
            previous_ids: The token before each slot, `[...]`.
            hidden_states: The slot's normed hidden state, `[..., D]`.
            state: The recurrent state before the slot, `[..., r]`; `None` at the start of a block.

        Returns:
            The features `f_k` `[..., r]`, which `markov_w2` maps to the transition bias, and the state after the slot
            (`None` for a head without a state).
        """
        embedding = self.markov_w1(previous_ids)  # [..., r]
        if self.head_type == "vanilla":
            return embedding, None
        if self.head_type == "gated":
            gate = self.gate_proj(torch.cat([hidden_states, embedding], dim=-1))
            return torch.sigmoid(gate) * embedding, None
        if state is None:
            state = torch.zeros_like(embedding)
        joint = self.joint_proj(torch.cat([state, embedding, hidden_states], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def features(self, previous_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        The features of all slots at once, when the token before each slot is known (training, and scoring given drafts).

        Args:
            previous_ids: `[..., G]`.
            hidden_states: `[..., G, D]`.

        Returns:
            `f_k` for every slot, `[..., G, r]`.
        """
        if self.head_type != "rnn":
            return self.step(previous_ids, hidden_states, None)[0]
        state, features = None, []
        for slot in range(previous_ids.shape[-1]):
            feature, state = self.step(previous_ids[..., slot], hidden_states[..., slot, :], state)
            features.append(feature)
        return torch.stack(features, dim=-2)

    def forward(self, previous_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The transition bias of every slot given the tokens before them, `[..., G, V_draft]`."""
        return self.markov_w2(self.features(previous_ids, hidden_states))


class ConfidenceHead(nn.Module):
    """
    Predicts, for each slot, the probability that its draft is accepted given that all drafts before it are.

    It reads `h_k` and, optionally, the Markov embedding of `x_{k-1}`, but never `x_k`. So ending a draft where the confidence
    is low leaves the distribution of the output exact (paper section 3.3).
    """

    def __init__(self, config: BlockDrafterConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1, bias=config.confidence_bias)

    def forward(self, hidden_states: torch.Tensor, previous_embeddings: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            hidden_states: Normed hidden states, `[..., D]`.
            previous_embeddings: `W1[x_{k-1}]`, `[..., r]`; only read when the head was built with it.

        Returns:
            Confidence logits (before the sigmoid), `[...]`.
        """
        if self.with_markov:
            assert previous_embeddings is not None
            hidden_states = torch.cat([hidden_states, previous_embeddings], dim=-1)
        return self.proj(hidden_states).squeeze(-1)
