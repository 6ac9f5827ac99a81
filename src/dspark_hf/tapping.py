"""The hidden states that a drafter reads of its target: the outputs of some of its layers, concatenated."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .target_config import num_decoder_layers, optional_field
from .transformers_names import has_capturing_hooks, output_hidden_states, remove_capturing_hooks


def batch_axis(text: PreTrainedConfig, state: torch.Tensor) -> int:
    """
    The axis of the rows in a hidden state; that of the tokens follows it.

    AltUp keeps its streams in front of the rows, `[n, B, T, D]`; others behind the tokens, `[B, T, n, D]`.

    Args:
        text: The configuration of the target's decoder.
        state: An entry of the target's `hidden_states`.
    """
    return 1 if state.dim() == 4 and optional_field(text, "altup_num_inputs") is not None else 0


class Tap:
    """
    Reads hidden states from the passes of a target.

    A target may have several residual streams (DeepSeek-V4, Gemma 3n): a drafter reads their mean. The last entry that
    transformers returns is then no such state, but what the streams became behind the last layer. So that layer's
    output is read directly. So it is where a drafter wants the last layer's output before the final norm, which serving engines
    give it and transformers does not.

    ```python
    >>> tap = Tap(target, [1, 3])  # doctest: +SKIP
    >>> with tap.reading():  # doctest: +SKIP
    ...     output = target(input_ids, output_hidden_states=tap.argument)
    >>> tap.features(output).shape  # [B, T, 2 * D]  # doctest: +SKIP
    ```

    Args:
        target: The target.
        indices: Entries of `hidden_states`. Entry 0 is the embedding output and entry `i + 1` the output of layer `i`; that of
            the last of `N` layers is normed. Entry `N + 1`, which transformers does not have, is the same before the norm.

    Raises:
        ValueError: when entry `N + 1` is wanted of a target whose last layer is not found.
    """

    def __init__(self, target: PreTrainedModel, indices: list[int]):
        text = target.config.get_text_config(decoder=True)
        self.indices = indices
        self._text = text
        self._num_layers, self._width = num_decoder_layers(text), int(text.hidden_size)
        self._last_output: torch.Tensor | None = None
        last = {self._num_layers, self._num_layers + 1} & set(indices)
        layers = getattr(target.get_decoder(), "layers", None) if last else None
        self._last_layer = None if layers is None else layers[self._num_layers - 1]
        self._before_norm = self._num_layers + 1 in last
        if self._before_norm and self._last_layer is None:
            raise ValueError(
                f"The drafter reads the last layer's output before the final norm, which cannot be found in "
                f"{type(target).__name__}: its decoder has no list of layers."
            )

    @property
    def argument(self) -> list[int] | bool:
        """What to pass as `output_hidden_states=`."""
        return output_hidden_states(sorted({min(index, self._num_layers) for index in self.indices}))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """The passes whose states are wanted run inside."""
        self._last_output = None
        if self._last_layer is None:
            yield
            return
        handle = self._last_layer.register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()

    def features(self, output: Any, indices: list[int] | None = None) -> torch.Tensor:
        """The states that an output of the target has of `T` tokens, `[B, T, m * D]`: all that are tapped, or some of them."""
        chosen = self.indices if indices is None else indices
        states = [self._without_streams(self._state(output, index)) for index in chosen]
        # The layers of a target spread over devices leave their outputs there.
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)

    def batch_axis(self, state: torch.Tensor) -> int:
        """The axis of the rows in a hidden state; that of the tokens follows it."""
        return batch_axis(self._text, state)

    def _state(self, output: Any, index: int) -> torch.Tensor:
        last = self._last_output
        if index > self._num_layers:
            assert last is not None, "the pass runs inside reading()"
            return last
        state: torch.Tensor = output.hidden_states[index]
        is_joined = index == self._num_layers and last is not None and last.dim() == 4 and state.dim() == 3
        return last if is_joined and last is not None else state

    def _without_streams(self, state: torch.Tensor) -> torch.Tensor:
        if state.dim() == 3 and state.shape[-1] > self._width:  # Qwen4-Exp joins its streams, `[B, T, n * D]`.
            return state.unflatten(-1, (-1, self._width)).mean(2)
        return state if state.dim() == 3 else state.mean(0 if self.batch_axis(state) == 1 else 2)

    def _keep(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        self._last_output = state if state.dim() == 4 or self._before_norm else None


_lock = threading.Lock()
_num_tapped: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def capturing_hooks(target: PreTrainedModel) -> Iterator[None]:
    """
    Passes inside leave no hooks on a target that had none.

    transformers adds hooks when hidden states are first asked for, and lets them stay. A model with them cannot be pickled.
    Contexts of one target may overlap; the hooks go when the last one ends.
    """
    with _lock:
        if target not in _num_tapped and has_capturing_hooks(target):
            is_counted = False
        else:
            is_counted = True
            _num_tapped[target] = _num_tapped.get(target, 0) + 1
    try:
        yield
    finally:
        with _lock:
            if is_counted:
                _num_tapped[target] -= 1
                if _num_tapped[target] == 0:
                    del _num_tapped[target]
                    remove_capturing_hooks(target)
