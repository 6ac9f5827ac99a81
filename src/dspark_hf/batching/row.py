"""A request that is being decoded, prepared by `generate` itself so that its settings mean what they mean there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StopStringCriteria
from transformers.generation import StoppingCriteriaList

from ..generation.candidate_generator import Draft
from ..generation.logits_process import drafting_processors, is_rowwise
from ..generation.output import Output
from ..generation.requirements import check_call
from ..generation.returned import Returned
from ..generation.stopping import StoppingRules
from ..generation.target_model import TargetOutput
from ..generation.token_choice import TokenChoice
from ..ragged.supported import length_limits
from ..transformers_names import GenerativeModel, compute_device
from .races import RaceLogitsProcessor, Races
from .requests import FinishReason, GenerationRequest, GenerationResult

_OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
# Fields of a generation configuration that ask for something that a shared pass does not give.
_NOT_HERE = {
    "num_return_sequences": (None, 1),
    "return_dict_in_generate": (None, False),
    "guidance_scale": (None, 1, 1.0),
    "cache_implementation": (None,),
    "use_cache": (None, True),
    "token_healing": (None, False),
}


class Row:
    """
    The state of one request.

    Args:
        target: The target.
        request: The request.
        tokenizer: For stop strings.
        serial: Tells requests apart that have the same place after one another.

    Raises:
        ValueError: for a prompt or settings that cannot be decoded; the message says what to do.
    """

    def __init__(
        self,
        target: GenerativeModel,
        request: GenerationRequest,
        tokenizer: PreTrainedTokenizerBase | None,
        serial: int,
    ):
        self.request = request
        self.serial = serial
        self.place = 0
        self.num_passes = self.num_drafted = self.num_accepted = 0
        self.error: Exception | None = None
        self.was_cancelled = False
        device, vocab_size = compute_device(target), target.config.get_text_config(decoder=True).vocab_size
        ids = _checked_prompt(request.input_ids, vocab_size).to(device)
        self.num_prompt_tokens = ids.shape[1]
        self.processors, criteria, config = _prepared(target, ids, request, tokenizer)
        check_call(target, ids, config)
        for name, limit in length_limits(target).items():
            if config.max_length > limit:
                raise ValueError(
                    f"The request may grow to {config.max_length} tokens, but beyond the {name} of {type(target).__name__}, "
                    f"{limit} tokens, rows that share a pass influence each other. Lower max_new_tokens."
                )
        self.drafting_processors = drafting_processors(self.processors)
        self.rules = StoppingRules(criteria, config)
        self.do_sample = bool(config.do_sample)
        self.seed: int | None = None
        self.races: Races | None = None
        if self.do_sample:
            self.seed = int(torch.randint(2**62, (1,))) if request.seed is None else request.seed
            self.races = Races(self.seed, vocab_size, device)
        self.output = Output(ids, self.rules, Returned(config), streamer=request.streamer)
        if self.output.room < 1:
            raise ValueError(
                f"The prompt has {self.num_prompt_tokens} tokens and max_length is {self.rules.max_length}, so there is no room "
                "for a new token. Pass max_new_tokens=."
            )
        self._chooses_at_once = is_rowwise(self.processors) and not self.rules.has_others

    @property
    def ids(self) -> torch.Tensor:
        """All tokens so far, `[1, L]`."""
        return self.output.ids

    @property
    def has_ended(self) -> bool:
        return self.output.is_finished or self.was_cancelled or self.error is not None

    def commit(self, fed: TargetOutput, draft: Draft) -> int:
        """
        Chooses the tokens of a round and adds them to the output. What goes wrong becomes the error of this request.

        Returns:
            How many tokens it added.
        """
        before = self.output.num_new
        processors = self.processors
        if self.races is not None:  # The most likely token, after this processor, is a draw.
            processors = LogitsProcessorList([*processors, RaceLogitsProcessor(self.races)])
        choice = TokenChoice(processors, False, fed.logits, draft)
        try:
            if self._chooses_at_once:
                decision = choice.decide().tolist()
                choice.settle(decision[0], decision[1:])
            self.output.commit(choice, fed)
        except Exception as error:  # Of a processor, a criterion or a streamer: no other request has to know.
            self.error = error
        count = self.output.num_new - before
        if self.races is not None:
            self.races.advance(count)
        self.num_passes += 1
        self.num_drafted += draft.ids.shape[1]
        self.num_accepted += min(choice.num_accepted, count)
        return count

    def result(self) -> GenerationResult:
        """The result of a request that has ended."""
        if self.request.streamer is not None and self.error is None:
            try:
                self.request.streamer.end()
            except Exception as error:
                self.error = error
        return GenerationResult(
            request=self.request,
            token_ids=list(self.output.new_ids),
            finish_reason=self._finish_reason(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_passes=self.num_passes,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            seed=self.seed,
            error=self.error,
        )

    def _finish_reason(self) -> FinishReason:
        if self.error is not None:
            return "error"
        if self.output.is_finished:
            if self.output.new_ids[-1] in self.rules.eos_ids:
                return "eos"
            return "length" if self.output.room <= 0 else "stop"
        return "cancelled"


def _checked_prompt(given: Any, vocab_size: int) -> torch.Tensor:
    """The prompt as `[1, P]`."""
    ids = torch.as_tensor(given)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or not ids.numel() or ids.is_floating_point():
        raise ValueError(
            f"The prompt of a request has the shape {list(torch.as_tensor(given).shape)} and dtype {ids.dtype}; it must be one "
            "row of at least one token id."
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"The prompt has token ids from {int(ids.min())} to {int(ids.max())}, but the target has {vocab_size} tokens. Encode "
            "it with the target's tokenizer."
        )
    return ids.long()


def _prepared(
    target: GenerativeModel,
    ids: torch.Tensor,
    request: GenerationRequest,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[LogitsProcessorList, StoppingCriteriaList, GenerationConfig]:
    """What `generate` makes of the settings of a request, without running the target."""
    settings = dict(request.settings)
    fields = GenerationConfig().to_dict().keys() | _OBJECTS
    if unknown := sorted(settings.keys() - fields):
        raise ValueError(
            f"{', '.join(unknown)}: no settings of a request. It takes the fields of GenerationConfig and {', '.join(_OBJECTS)}."
        )
    for name, usual in _NOT_HERE.items():
        if settings.get(name) not in usual:
            raise ValueError(f"{name}={settings[name]} does not work in shared passes. Call generate for this prompt.")
    stop_strings = settings.pop("stop_strings", target.generation_config.stop_strings)
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings= needs the tokenizer: pass tokenizer= to generate_many as well.")
        criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
        settings["stopping_criteria"] = StoppingCriteriaList([*(settings.get("stopping_criteria") or ()), criterion])
    captured: list[Any] = []

    def capture(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        captured.extend((logits_processor, stopping_criteria, generation_config))
        return input_ids

    mask = torch.ones_like(ids)
    always: dict[str, Any] = {"return_dict_in_generate": False, "stop_strings": None}
    target.generate(ids, attention_mask=mask, custom_generate=capture, **(settings | always))
    processors, criteria, config = captured
    return processors, criteria, config
