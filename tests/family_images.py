"""A prompt with an image for a tiny target of any family: whatever layout of pixels its class takes."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import target_families
import torch
from transformers import PreTrainedModel

import tiny

IMAGE_ID = target_families.IMAGE_ID


def prompt_with_image(target: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """
    Inputs of `generate`; `None` if no layout that is tried here suits the class.

    A layout suits if the target takes it and answers another image differently.
    """
    for images in layouts(target):
        num_tokens = counts(target, images)
        for count in num_tokens:
            inputs = prompt(target, images, count)
            try:
                seen, other = (target(**inputs | drawn(images, seed)).logits for seed in (1, 2))
            except Exception as error:  # Anything that a class may say of an unsuitable layout.
                said = re.search(r"features: (\d+)", str(error))
                if said and int(said[1]) not in num_tokens:
                    num_tokens.append(int(said[1]))
                continue
            if seen.shape == other.shape and not torch.allclose(seen[:, -1], other[:, -1]):
                return inputs
    return None


def layouts(target: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Pixels of one image, with what else a class wants to know of them."""
    taken = set(inspect.signature(target.forward).parameters)
    vision = getattr(target.config, "vision_config", target.config)
    patch = _side(vision, "patch_size", 4)
    side = _side(vision, "image_size", 4 * patch if isinstance(patch, int) else 16)
    frames = getattr(vision, "temporal_patch_size", None) or 1
    if not isinstance(side, int) or not isinstance(patch, int):
        return
    per_side = max(2, side // patch)
    square = (3, side, side)
    grids = [torch.tensor([[1, n, n]]) for n in (per_side, 2)]
    flat = 3 * patch * patch
    for grid, num_frames in itertools.product(grids, (frames, 3 - frames)):
        num_patches = int(grid.prod())
        for name in ("image_grid_thw", "image_grid_hw"):
            if name in taken:
                given = {name: grid if name.endswith("thw") else grid[:, 1:]}
                yield {"pixel_values": torch.zeros(num_patches, num_frames * flat), **given}
                yield {"pixel_values": torch.zeros(num_patches, 3, patch, patch), **given}
    sizes = {"image_sizes": torch.tensor([[side, side]])} if "image_sizes" in taken else {}
    yield {"pixel_values": torch.zeros(1, *square), **sizes}
    yield {"pixel_values": torch.zeros(1, *square)}
    if "pixel_attention_mask" in taken:
        shape = (1, 1, *square)
        yield {
            "pixel_values": torch.zeros(shape),
            "pixel_attention_mask": torch.ones(1, 1, side, side, dtype=torch.long),
        }
        given = {
            "spatial_shapes": grids[0][:, 1:],
            "pixel_attention_mask": torch.ones(1, per_side**2, dtype=torch.long),
        }
        yield {"pixel_values": torch.zeros(1, per_side**2, flat), **given}
        yield {"pixel_values": torch.zeros(shape), "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}
    if "qformer_input_ids" in taken:
        words = {"qformer_input_ids": torch.ones(1, 3, dtype=torch.long)}
        yield {"pixel_values": torch.zeros(1, *square), **words}
        yield {"pixel_values": torch.zeros(1, 4, *square), **words}
    if "target_sizes" in taken:
        for pixels in (torch.zeros(1, 3, patch, patch * per_side**2), torch.zeros(1, *square)):
            yield {"pixel_values": pixels, "target_sizes": torch.tensor([[per_side, per_side]])}
    if "image_attention_mask" in taken:
        yield {"pixel_values": torch.zeros(1, 1, *square)}
    yield {"pixel_values": torch.zeros(1, 1, *square), **sizes}
    yield {"pixel_values": torch.zeros(1, 2, *square), **sizes}
    yield {"pixel_values": torch.zeros(1, per_side**2, flat)}
    yield {"pixel_values": torch.zeros(1, frames, patch, patch, 3)}
    if "high_res_pixel_values" in taken:
        high = getattr(getattr(target.config, "high_res_vision_config", vision), "image_size", side)
        yield {"pixel_values": torch.zeros(1, *square), "high_res_pixel_values": torch.zeros(1, 3, high, high)}
    if "aspect_ratio_ids" in taken:
        tiles = int(vision.max_num_tiles)
        yield {
            "pixel_values": torch.zeros(1, 1, tiles, *square),
            "aspect_ratio_ids": torch.tensor([[1]]),
            "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
            "cross_attention_mask": torch.ones(1, 1, 1, tiles, dtype=torch.long),
        }
    if "image_position_ids" in taken:
        places = torch.cartesian_prod(torch.arange(per_side), torch.arange(per_side))[None]
        joined = getattr(vision, "model_patch_size", patch)
        for width in (flat, 3 * joined**2):
            yield {"pixel_values": torch.zeros(1, per_side**2, width), "image_position_ids": places}
    if "image_merge_sizes" in taken:
        given = {"image_grid_thw": grids[0], "image_merge_sizes": torch.tensor([1])}
        yield {"pixel_values": torch.zeros(per_side**2, flat), **given}
    if "image_patches" in taken:
        yield {"image_patches": torch.zeros(1, per_side**2, flat)}


def _side(config: Any, name: str, default: int) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value[0] if isinstance(value, list | tuple) else value


def counts(target: PreTrainedModel, images: dict[str, torch.Tensor]) -> list[int]:
    """How many tokens of the prompt may stand for the image."""
    try:
        found = target.get_image_features(**images)
        states = getattr(found, "pooler_output", found)
        if states is None:
            states = found.last_hidden_state
        states = torch.cat([part.flatten(0, -2) for part in states]) if isinstance(states, list | tuple) else states
        return [states.flatten(0, -2).shape[0]]
    except Exception:  # Anything that a class may say of an unsuitable layout.
        return [0, 1, 4, 16, 17, 64]


def drawn(images: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same layout with random pixels."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in images.items()
    }


def prompt(target: PreTrainedModel, images: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Text around an image of so many tokens."""
    before, after = (tiny.prompt(n, seed=n)["input_ids"].clamp(max=IMAGE_ID - 1) for n in (3, 5))
    image = torch.full((1, count), IMAGE_ID)
    starts, ends = (torch.tensor([[token]] if count else [[]], dtype=torch.long) for token in (103, 104))
    ids = torch.cat([before, starts, image, ends, after], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **drawn(images, 1)}
    taken = inspect.signature(target.forward).parameters
    kinds = (ids == IMAGE_ID).long()
    inputs |= {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in taken}
    if "image_embeds_position_mask" in taken:
        inputs["image_embeds_position_mask"] = kinds.bool()
    if "image_attention_mask" in taken:
        inputs["image_attention_mask"] = torch.ones(1, ids.shape[1], 1, dtype=torch.long)
    return inputs


def another(inputs: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A prompt of the same layout with other pixels, which begins with other words."""
    words = tiny.prompt(3, seed=10 + seed)["input_ids"].clamp(max=IMAGE_ID - 1)
    return drawn(inputs, 10 + seed) | {"input_ids": torch.cat([words, inputs["input_ids"][:, 3:]], dim=1)}
