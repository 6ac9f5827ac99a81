"""
Adapts a drafter to prompts: the target answers them, the drafter learns from the answers, and the result is compared with
the drafter before.

Each stage leaves a file, from which an interrupted run resumes:

1. `responses.jsonl`, `general.jsonl`: the target's answers, sorted into shares by `shares.py`.
2. `features/`: what the drafter reads of its target, computed once, if the disk has room.
3. `run/`: training, for which `plan.json` holds the number of steps.
4. `calibration.jsonl`: rounds of the new drafter, to which its confidences are calibrated.
5. `drafter/`: the new drafter; `adaptation.json`: the comparison.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase
from transformers.utils import logging

from ..conversations.prompts import read_prompts
from ..conversations.rows import encode_rows, end_token_ids
from ..conversations.templates import has_template, thinking_switch
from ..drafter import Drafter
from ..evaluation.methods import calibration_method
from ..evaluation.records import RecordFile
from ..evaluation.runner import BenchSettings, run_bench
from ..evaluation.tasks import Task, to_prompt
from ..loading import check_is_target, default_device, load_target
from ..responses import RegenerationSettings, Regenerator
from ..responses.self_prompting import prompt_settings, self_prompt
from ..responses.settings import resolve_sampling
from ..scheduling import Calibration, ConfidenceRounds, fit_temperatures
from ..storage.atomic import write_text
from ..training.features import CachePlan, cache_features
from ..training.muon import has_muon
from ..training.options import train_command
from ..training.run import TrainingRun, train
from ..transformers_names import GenerativeModel, compute_device
from .budget import PROBED_STEPS, Deadline, StepClock, steps_within
from .comparison import Change, compare, verdict
from .settings import AdaptSettings
from .shares import CHOOSE, COMPARE, TRAIN, read_rows, single_answers, write_shares

logger = logging.get_logger(__name__)

CALIBRATION_PROMPTS = 48
COMPARED_ANSWERS = 200  # At most, of each sort.
LEAST_ANSWERS = 8  # Of the user's prompts, in each share.
DISK_SHARE = 0.5  # Of the free space, for features.

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Adaptation:
    """
    Args:
        drafter: The adapted drafter, as it was saved.
        folder: Where it was saved.
        prompts: What it gained on the user's held-out prompts.
        general: What it gained or lost on held-out general prompts; `None` without them.
        calibration: Of its confidences; `None` if it has none.
        verdict: One line: what was gained, and whether to use it.
        document: All of this, and the settings, as written to `adaptation.json`.
    """

    drafter: Drafter
    folder: Path
    prompts: Change
    general: Change | None
    calibration: Calibration | None
    verdict: str
    document: dict[str, Any]

    @property
    def changes(self) -> dict[str, Change]:
        """What was gained, by the sort of prompts."""
        return {"your prompts": self.prompts} | ({"general prompts": self.general} if self.general else {})


def adapt(
    settings: AdaptSettings,
    say: Callable[[str], None] = lambda line: None,
    on_progress: OnProgress = lambda done, total: None,
) -> Adaptation:
    """
    Adapts a drafter, or resumes an interrupted run.

    ```python
    >>> adapted = adapt(AdaptSettings(target, drafter, "my_prompts.jsonl", "adapted", minutes=20))  # doctest: +SKIP
    >>> print(adapted.verdict)  # doctest: +SKIP
    ```

    Args:
        settings: What to adapt, to which prompts.
        say: Called with a line about each stage.
        on_progress: Called with the number of finished items and their total while rounds are decoded and compared.

    Raises:
        ValueError: when target, drafter and prompts do not fit one another, there are too few prompts, or the output folder
            holds the run of other settings.
    """
    return _Run(settings, say, on_progress).finish()


class _Run:
    """The stages of one adaptation, in the order of the module's description."""

    def __init__(self, settings: AdaptSettings, say: Callable[[str], None], on_progress: OnProgress):
        self.settings, self.say, self.on_progress = settings, say, on_progress
        self.folder = Path(settings.output)
        check_is_target(settings.target)
        self.before = Drafter.from_pretrained(settings.drafter, dtype="auto").eval()
        self.dtype = self.before.dtype
        self.before.float()
        self.rows = list(islice(read_prompts(settings.prompts), settings.max_prompts))
        self.plan = Plan(self.folder / "plan.json", settings)
        self.device = settings.device or default_device()
        train_command(self.training([settings.prompts], self.folder / "run", 1))  # Unknown names are found early.
        say(f"Loading the target {settings.target} ...")
        self.target: GenerativeModel
        self.tokenizer: PreTrainedTokenizerBase
        self.target, self.tokenizer = load_target(settings.target, settings.dtype, self.device)
        self.before.to(compute_device(self.target)).bind(self.target)

    def finish(self) -> Adaptation:
        settings = self.settings
        self.say(f"The target answers {len(self.rows):,} prompts ...")
        own = self.answered(self.rows, self.folder / "responses.jsonl")
        self.check_enough(own)
        general = self.general()
        run = self.trained(own, general)
        after, calibration = self.saved(run, own)
        self.say("Comparing the drafter before and after ...")
        prompts = self.change(after, own)
        others = self.change(after, general) if general else None
        text = verdict(prompts, others, str(self.folder / "drafter"))
        document = {
            "settings": asdict(settings),
            "steps": run.trainer.state.global_step,
            "prompts": asdict(prompts),
            "general": asdict(others) if others else None,
            "temperatures": calibration.temperatures if calibration else None,
            "verdict": text,
        }
        write_text(self.folder / "adaptation.json", json.dumps(document, indent=1) + "\n")
        return Adaptation(after, self.folder / "drafter", prompts, others, calibration, text, document)

    # ------------------------------------------------------------------ responses

    @property
    def answering(self) -> RegenerationSettings:
        return RegenerationSettings(**self.settings.answers)

    def answered(self, prompts: list[dict[str, Any]], output: Path) -> dict[str, Path]:
        """Answers prompts; returns the file of each share."""
        Regenerator(self.target, self.tokenizer, self.answering).run(prompts, output)
        return write_shares(output, self.folder, self.settings.held_out)

    def general(self) -> dict[str, Path] | None:
        """The answers to general prompts by share; `None` without general prompts."""
        settings, number = self.settings, self.settings.general_prompts
        if not number:
            return None
        if settings.general is not None:
            rows = list(islice(read_prompts(settings.general), number))
        elif has_template(self.tokenizer, "there are no general prompts: name some with general="):
            self.say(f"The target writes {number:,} general prompts ...")
            written = self.folder / "general.prompts.jsonl"
            self_prompt(self.target, self.tokenizer, number, written, prompt_settings(settings.seed))
            rows = list(read_prompts(written))
        else:
            return None
        self.say(f"The target answers {len(rows):,} general prompts ...")
        shares = self.answered(rows, self.folder / "general.jsonl")
        return shares if len(read_rows(shares[COMPARE])) >= LEAST_ANSWERS else None

    def check_enough(self, shares: dict[str, Path]) -> None:
        counts = {share: len(read_rows(file)) for share, file in shares.items()}
        if min(counts.values()) < LEAST_ANSWERS:
            raise ValueError(
                f"{sum(counts.values())} answered prompts are too few: {counts[TRAIN]} to train on, {counts[CHOOSE]} to choose "
                f"the best checkpoint and {counts[COMPARE]} to compare with, where each needs {LEAST_ANSWERS}. Give more "
                "prompts, or another share for held_out."
            )

    def encoded(self, file: Path) -> list[dict[str, Any]]:
        """The rows of a share as tokens."""
        ends = end_token_ids(self.target, self.tokenizer) or None
        limit = self.settings.training.get("max_length", 4096)
        return encode_rows(read_rows(file), self.tokenizer, limit, ends, **thinking_switch(self.settings.thinking))

    # ------------------------------------------------------------------ training

    def trained(self, own: dict[str, Path], general: dict[str, Path] | None) -> TrainingRun:
        """The drafter trained on the user's and on general prompts; the user's choose the best checkpoint."""
        sources = [own[TRAIN], *([general[TRAIN]] if general else [])]
        data, eval_data = self.features(sources), self.features([own[CHOOSE]])
        steps = self.plan.steps or self.settings.max_steps or self.steps_in_time(data, own[CHOOSE])
        self.plan.note(steps)
        self.say(f"Training for {steps:,} steps ...")
        every = max(1, steps // self.settings.evaluations)
        command = train_command(
            self.training(data, self.folder / "run", steps)
            | {"eval_data": eval_data, "eval_strategy": "steps", "eval_steps": every, "save_steps": every}
            | {"load_best_model_at_end": True, "save_total_limit": 2}
        )
        callbacks: list[Any] = [EarlyStoppingCallback(self.settings.patience)]
        if self.settings.max_steps is None:
            callbacks.append(Deadline(1.2 * 60 * self.settings.minutes))
        run = train(command, loaded=(self.target, self.tokenizer), callbacks=callbacks)
        self.plan.note(run.trainer.state.global_step)  # Resumed, it stops where it stopped early.
        return run

    def features(self, files: list[Path]) -> list[str]:
        """What the drafter reads of its target for these rows: a cache if the disk has room, else the files themselves."""
        rows = [row for file in files for row in self.encoded(file)]
        config = self.before.config
        if CachePlan(config).num_bytes(rows) > DISK_SHARE * shutil.disk_usage(self.folder).free:
            return [str(file) for file in files]
        name = "-".join(file.name.removesuffix(".jsonl") for file in files)
        self.say(f"Computing the features of {len(rows):,} conversations ...")
        return [str(cache_features(self.target, config, rows, self.folder / "features" / name))]

    def training(self, data: list[str], output: Path, steps: int) -> dict[str, Any]:
        """The settings of `dspark-hf train`."""
        settings = self.settings
        is_lora = settings.lora_rank is not None
        chosen: dict[str, Any] = {
            "target": settings.target,
            "drafter": settings.drafter,
            "data": data,
            "held_out": 0.0,
            "thinking": settings.thinking,
            "output_dir": str(output),
            "max_steps": steps,
            "per_device_train_batch_size": settings.batch_size,
            "per_device_eval_batch_size": settings.batch_size,
            "num_anchors": settings.num_anchors,
            "learning_rate": settings.learning_rate or (1e-3 if is_lora else 1.5e-3),
            "lr_scheduler_type": "cosine",
            "matrix_optimizer": "adamw" if is_lora or not has_muon() else "muon",
            "lora_rank": settings.lora_rank,
            "use_cpu": torch.device(self.device).type == "cpu",
            "report_to": ["none"],
            "seed": settings.seed,
        }
        return chosen | settings.training

    def steps_in_time(self, data: list[str], choose: Path) -> int:
        """How many steps fit into the time, from a few timed ones."""
        self.say(f"Timing {PROBED_STEPS} steps ...")
        folder, clock = self.folder / "probe", StepClock()
        timed = self.training(data, folder, PROBED_STEPS) | {"save_strategy": "no", "logging_strategy": "no"}
        train(train_command(timed), loaded=(self.target, self.tokenizer), callbacks=[clock])
        shutil.rmtree(folder)
        batches = -(-len(read_rows(choose)) // self.settings.batch_size)
        return steps_within(60 * self.settings.minutes, clock.step_s, self.settings.evaluations, batches)

    # ------------------------------------------------------------------ calibration and comparison

    def saved(self, run: TrainingRun, own: dict[str, Path]) -> tuple[Drafter, Calibration | None]:
        """The best drafter of a run, LoRA matrices merged, saved in the dtype of the one it started from, and calibrated."""
        model: Any = run.trainer.model
        drafter: Drafter = model.merge_and_unload() if self.settings.lora_rank is not None else model
        drafter.eval().to(self.dtype).bind(self.target)
        calibration = self.calibrated(drafter, own)
        drafter.save_pretrained(self.folder / "drafter")
        return drafter.float(), calibration

    def calibrated(self, drafter: Drafter, own: dict[str, Path]) -> Calibration | None:
        """Calibrates the confidences to rounds of the prompts that chose the checkpoint; `None` if there are none."""
        if not drafter.config.gives_confidence:
            return None
        self.say("Calibrating the confidences ...")
        rows = read_rows(own[CHOOSE])[:CALIBRATION_PROMPTS]
        prompts = [to_prompt({name: row[name] for name in ("prompt", "messages") if name in row}) for row in rows]
        limit = self.answering.response_limit(self.target.generation_config)
        bench = BenchSettings(limit, self.temperature, self.settings.seed)
        drafter.config.confidence_temperatures = None
        method = calibration_method(deepcopy(drafter).to(self.target.dtype))
        with closing(RecordFile(self.folder / "calibration.jsonl", {"steps": self.plan.steps})) as file:
            task = Task("prompts", "other", prompts)
            run_bench(
                self.target, self.tokenizer, [method], [task], bench, file, lambda p: self.on_progress(p.done, p.total)
            )
            rounds = [round_ for record in file.records.values() for round_ in record.rounds]
        found = fit_temperatures(ConfidenceRounds.from_records(rounds, drafter.config.num_draft_tokens))
        drafter.config.confidence_temperatures = found.temperatures
        return found

    @property
    def temperature(self) -> float:
        """The temperature at which drafts are replayed; 0, for the most likely drafts, where top-k or top-p cut the answers."""
        sampling = resolve_sampling(self.answering, self.target.generation_config)
        is_whole = sampling.do_sample and not sampling.top_k and sampling.top_p == 1.0
        return sampling.temperature if is_whole else 0.0

    def change(self, after: Drafter, shares: dict[str, Path]) -> Change:
        """The drafter before and after, along the held-out answers."""
        answers = list(islice(single_answers(self.encoded(shares[COMPARE])), COMPARED_ANSWERS))
        return compare(self.before, after, self.target, answers, self.temperature, self.settings.seed, self.on_progress)


class Plan:
    """
    The settings of a run and its number of steps, in a file: a resumed run makes as many.

    Raises:
        ValueError: when the file is of other settings.
    """

    def __init__(self, file: Path, settings: AdaptSettings):
        self.file, self.steps = file, None
        self.settings = json.loads(json.dumps(asdict(settings) | {"output": None}))
        if not file.exists():
            return
        written = json.loads(file.read_text(encoding="utf-8"))
        theirs = written["settings"]
        if different := [
            f"{n} ({theirs.get(n)} there, {v} here)" for n, v in self.settings.items() if theirs.get(n) != v
        ]:
            raise ValueError(
                f"'{file.parent}' holds an adaptation with other settings: {', '.join(different)}. Use the same settings to "
                "resume it, or another output folder."
            )
        self.steps = written["steps"]

    def note(self, steps: int) -> None:
        self.steps = steps
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, json.dumps({"settings": self.settings, "steps": steps}, indent=1) + "\n")
