"""The configuration of EAGLE-3 drafters (Li et al., "EAGLE-3", 2025), which draft token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from ...configuration_drafter import DecoderDrafterConfig

# The sizes of latent attention: all of them, or none.
LATENT_SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim")


class Eagle3Config(DecoderDrafterConfig):
    r"""
    Configuration of an [`Eagle3Drafter`]. Most users build it with [`Eagle3Config.for_target`].

    Args:
        block_size (`int`): Tokens drafted per round, one after the other, and steps unrolled in training (paper: 7).
        target_layer_ids (`list[int]`):
            Tapped target layers. The EAGLE-3 paper uses three; for comparisons with DSpark, use the same five for both.
        taps_from_depth (`bool`):
            The taps follow from the target's depth N, as in files that name none: what enters layers 2, N // 2 and N - 3.
            `target_layer_ids` is then set when the drafter is bound to its target.
        use_aux_hidden_state (`bool`):
            Tapped layers are fused into a state. `False`: the state is the target's last one, after its final norm.
        norm_before_residual (`bool`):
            The residual stream of the layer starts from the normed state instead of the state itself.
        kv_lora_rank, q_lora_rank, qk_nope_head_dim, v_head_dim (`int`, *optional*):
            Sizes of latent attention (Kimi's drafters). A head then has `qk_nope_head_dim` channels and `head_dim` rotated ones.
        norm_before_fc (`bool`): A norm over all taps together before they are fused.
        norm_output (`bool`): The state handed to the next step is the normed one that the logits come from.

    The remaining arguments are those of [`~dspark_hf.configuration_drafter.DecoderDrafterConfig`] and
    [`~dspark_hf.configuration_drafter.DrafterConfig`], or have their usual transformers meaning.

    Raises:
        ValueError: when fields contradict each other. The message lists every contradiction found.
    """

    model_type = "dspark_eagle3"

    largest: ClassVar[dict[str, int]] = DecoderDrafterConfig.largest | dict.fromkeys(LATENT_SIZES, 2**20)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"eagle3": {}}
    # A draft starts from the state of the token before its anchor.
    first_anchor: ClassVar[int] = 1

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    taps_from_depth: bool = False
    use_aux_hidden_state: bool = True
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None

    @property
    def num_taps(self) -> int:
        if not self.use_aux_hidden_state:
            return 1
        return 3 if self.taps_from_depth else super().num_taps

    def taps_for(self, num_target_layers: int) -> list[int]:
        """
        As in [`DrafterConfig`]. Where the file names no taps they are those that vLLM and SGLang take for such files.

        Raises:
            ValueError: when the target is too shallow for three different taps.
        """
        if not self.use_aux_hidden_state:
            return [num_target_layers - 1]
        if not self.taps_from_depth:
            return super().taps_for(num_target_layers)
        taps = depth_taps(num_target_layers)
        if not taps[0] < taps[1] < taps[2]:
            raise ValueError(
                f"The drafter's files name no taps, and those that engines derive from a target's depth need 7 layers or more; "
                f"this target has {num_target_layers}. Load the target it was made for."
            )
        return taps

    def _taps_in_words(self) -> str:
        if not self.use_aux_hidden_state:
            return "the target's last hidden state, after its final norm"
        if self.target_layer_ids:
            return super()._taps_in_words()
        return "not in the file: what enters layers 2, N // 2 and N - 3 of a target with N layers"

    @property
    def layer_family(self) -> str | None:
        return "latent attention" if self.kv_lora_rank else super().layer_family

    @property
    def method(self) -> str:
        return "EAGLE-3"

    def describe(self) -> dict[str, str]:
        return super().describe() | {"drafts": f"one after the other, up to {self.block_size} per round"}

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        given = [name for name, size in self.named(LATENT_SIZES).items() if size is not None]
        if given and len(given) < len(LATENT_SIZES):
            yield f"latent attention needs {', '.join(name for name in LATENT_SIZES if name not in given)} as well."
        if given and self.qk_norm:
            yield "latent attention has no norms of queries and keys: set qk_norm=False."
        channels = self.head_dim + (self.qk_nope_head_dim or 0)
        if self.v_head_dim is not None and self.v_head_dim > channels:
            yield f"v_head_dim={self.v_head_dim} is more than the {channels} channels of a key."
        fuses = [n for n, value in self.named(("taps_from_depth", "norm_before_fc", "fc_norm")).items() if value]
        if not self.use_aux_hidden_state and fuses:
            yield f"use_aux_hidden_state=False takes no taps, which {' and '.join(fuses)}=True speak of."
        if self.num_hidden_layers != 1:
            yield f"num_hidden_layers={self.num_hidden_layers}: an EAGLE-3 drafter has one layer."


def depth_taps(num_target_layers: int) -> list[int]:
    """
    What serving engines tap for files that name no taps, as outputs of layers.

    vLLM (`get_eagle3_default_aux_hidden_state_layers`) and SGLang (`set_eagle3_layers_to_capture(None)`) both take the
    residual stream as it enters layers 2, N // 2 and N - 3.
    """
    return [1, num_target_layers // 2 - 1, num_target_layers - 4]
