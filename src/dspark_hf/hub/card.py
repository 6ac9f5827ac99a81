"""The model card of a drafter."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..modeling_drafter import DrafterModel
from ..storage.atomic import write_text
from .training_summary import TrainingSummary
from .words import gain_in_words, results_in_words, speed_in_words

CARD_FILE, BENCHMARK_FILE, CURVE_FILE = "README.md", "results.json", "throughput_curve.json"
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
MOST_CURVE_POINTS = 12

_BLANK = "# Model Card for Model ID"  # PEFT's, with nothing filled in.

# A placeholder in code snippets for a repository name that is not known.
YOUR_DRAFTER = "your-name/drafter"

# At the end of a generated card. It holds a digest of the text above it, so that an edited card is never overwritten.
_MARK = re.compile(r"\n<!-- Made by dspark-hf, and replaced at the next push unless edited. (\w+) -->\n\Z")


def build_card(
    drafter: DrafterModel,
    folder: str | PathLike[str],
    *,
    adapts: str | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    tags: Iterable[str] = (),
    custom_generate: bool = False,
    serving: Mapping[str, str] | None = None,
    token: str | bool | None = None,
) -> ModelCard:
    """
    Makes the card from the drafter and from the files in the folder of its weights. It contains no local paths.

    Args:
        drafter: The drafter.
        folder: Where its weights are; `training.json`, `results.json` and `throughput_curve.json` are looked for there.
        adapts: For a folder with a PEFT adapter instead of a drafter: name or folder of the drafter that it adapts.
        repo_id: The name on the Hub, for the snippets; a placeholder by default.
        base_model: The target's name on the Hub; by default the name in the configuration, if it can be one.
        license: The drafter's licence; by default the target's, which is looked up on the Hub.
        tags: Additional tags.
        custom_generate: Whether the repository contains `custom_generate/generate.py`.
        serving: The commands by which engines serve the drafter, by the engine's name.
        token: As in `from_pretrained`, for asking the Hub about the target.
    """
    folder, config = Path(folder), drafter.config
    named = base_model or config.target_name_or_path
    base_model = named if is_hub_name(named) else None
    target = base_model or (Path(named).name if named else "its target")
    target_place = base_model or f"path/to/{Path(named).name if named else 'target'}"
    adapted = adapts if adapts is None or is_hub_name(adapts) else f"path/to/{Path(adapts).name}"
    training = TrainingSummary.load(folder)
    benchmark = _known_document(folder / BENCHMARK_FILE, "settings", "environment", "results", "identity")
    curve = _known_document(folder / CURVE_FILE, "token_counts", "pass_s")
    method = config.method
    listed_under = base_model if adapts is None else adapts if is_hub_name(adapts) else None
    all_tags = [
        "speculative-decoding",
        method.lower().replace("-", ""),
        *(["custom_generate"] if custom_generate else []),
    ]
    data = ModelCardData(
        base_model=listed_under,
        base_model_relation="adapter" if listed_under else None,
        datasets=(training.datasets if training else None) or None,
        library_name="dspark-hf" if adapts is None else "peft",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*all_tags, *(drafter.model_tags or ()), *tags])),
        **({"license": license} if license else licence_of(base_model, token)),
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        method=method,
        class_name=type(drafter).__name__,
        target=target,
        target_link=f"[{base_model}](https://huggingface.co/{base_model})" if base_model else target,
        target_place=target_place,
        adapts=adapted,
        repo_id=repo_id or YOUR_DRAFTER,
        is_placeholder=repo_id is None,
        architecture=_cells(architecture_of(drafter)) if adapts is None else {},
        training=training,
        training_tables=_training_tables(training),
        training_gain=_training_gain(training),
        figures=figure_files(training, folder),
        benchmark=_benchmark(benchmark) if benchmark else None,
        temperatures=[f"{temperature:.3g}" for temperature in config.confidence_temperatures or ()],
        curve=_curve(curve) if curve else None,
        custom_generate=custom_generate,
        serving=serving or {},
    )
    card.text = re.sub(r"\n{3,}", "\n\n", card.text).rstrip() + "\n"
    card.text += (
        f"\n<!-- Made by dspark-hf, and replaced at the next push unless edited. {_card_digest(card.content)} -->\n"
    )
    return card


def write_card(drafter: DrafterModel, folder: str | PathLike[str], **kwargs: Any) -> bool:
    """
    Writes the card into the folder of the weights, unless it has one that was written or edited by hand.

    Args:
        drafter, folder, kwargs: As in [`build_card`].

    Returns:
        Whether it was written.
    """
    file = Path(folder) / CARD_FILE
    if file.exists() and not is_generated(file.read_text(encoding="utf-8")):
        return False
    write_text(file, str(build_card(drafter, folder, **kwargs)))
    return True


def is_generated(text: str) -> bool:
    """Whether a card was made by [`build_card`] and not edited since, or is PEFT's blank one."""
    if _BLANK in text:
        return True
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _card_digest(text[: mark.start()])


def _card_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------- the target


def is_hub_name(name: str | None) -> bool:
    """Whether a name can be that of a model on the Hub: `owner/name`, and not a folder here."""
    if not name or "/" not in name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def licence_of(base_model: str | None, token: str | bool | None = None) -> dict[str, Any]:
    """The licence of the target, from the metadata of its card; empty if it cannot be read."""
    if base_model is None:
        return {}
    try:
        theirs = HfApi(token=token).model_info(base_model).card_data
    except Exception:  # Unknown or private, no network, offline mode: the card is written without it.
        return {}
    found = {name: theirs.get(name) for name in ("license", "license_name", "license_link")} if theirs else {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


# ---------------------------------------------------------------------- tables


def architecture_of(drafter: DrafterModel) -> dict[str, Any]:
    """A description of the drafter in words, by topic."""
    config = drafter.config
    included = " and ".join(
        name for name, held in (("embedding", config.has_embed_tokens), ("LM head", config.has_lm_head)) if held
    )
    size = sum(parameter.numel() * parameter.element_size() for parameter in drafter.parameters())
    return {topic.capitalize(): words for topic, words in config.describe().items()} | {
        "Embedding and LM head": f"included: {included}" if included else "those of the target",
        "Size": f"{drafter.num_parameters():,} parameters, {size / 1e6:,.1f} MB "
        f"({str(drafter.dtype).removeprefix('torch.')})",
    }


def figure_files(training: TrainingSummary | None, folder: Path) -> list[str]:
    """Names of the image files of a training run that are in the folder."""
    named = training.figures if training else []
    return [name for name in named if name == Path(name).name and (folder / name).is_file()]


def _training_tables(training: TrainingSummary | None) -> dict[str, dict[str, str]]:
    if training is None:
        return {}
    tables = {
        "Result": results_in_words(training.results),
        "Setting": training.settings,
        "Trained with": training.environment,
    }
    return {title: _cells(values) for title, values in tables.items() if values}


def _training_gain(training: TrainingSummary | None) -> str | None:
    """A sentence about the expected gain; `None` if no conversations were held out."""
    length = training.results.get("acceptance_length") if training else None
    return gain_in_words(length) if isinstance(length, int | float) else None


def _benchmark(document: dict[str, Any]) -> dict[str, Any]:
    """The results of a `dspark-hf bench` document."""
    settings, machine = document["settings"], document["environment"]
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']}"
    devices = ", ".join(machine.get("accelerators") or [machine.get("cpu") or "CPU"])
    checked = {method: identity for method, identity in document["identity"].items() if identity["checked"]}
    lines = [
        f"{method}: {identity['checked'] - identity['different']} of {identity['checked']} greedy answers equal those of plain "
        "`generate`."
        for method, identity in checked.items()
    ]
    return {
        "settings": f"{how}, up to {settings['max_new_tokens']} new tokens, {settings.get('dtype', '')} on {devices}",
        "speed": speed_in_words(document["results"]),
        "rows": [_result_row(result) for result in document["results"]],
        "identity": lines or ["Greedy answers were not compared with those of plain `generate`."],
    }


def _result_row(result: dict[str, Any]) -> list[str]:
    estimates = result["estimates"]
    return [
        _cell(f"{result['group']} ({result['num_prompts']})"),
        _cell(result["method"]),
        _interval_text(estimates["acceptance_length"], 2, with_interval=True),
        _interval_text(estimates["acceptance_rate"], 2),
        _interval_text(estimates["tokens_per_second"], 1),
        _interval_text(estimates["speedup"], 2, with_interval=True),
    ]


def _interval_text(estimate: dict[str, Any], decimals: int, with_interval: bool = False) -> str:
    if estimate["value"] is None:
        return "-"
    interval = (
        f" ({estimate['low']:.{decimals}f} to {estimate['high']:.{decimals}f})" if estimate["low"] is not None else ""
    )
    return f"{estimate['value']:.{decimals}f}{interval if with_interval else ''}"


def _curve(curve: dict[str, Any]) -> dict[str, Any]:
    """A `throughput_curve.json` as a table."""
    where = curve.get("measured_on") or {}
    points = list(zip(curve["token_counts"], curve["pass_s"], strict=True))[:MOST_CURVE_POINTS]
    return {
        "measured_on": ", ".join(str(where[name]) for name in ("device", "dtype") if where.get(name))
        or "an unnamed machine",
        "tokens": [str(count) for count, _ in points],
        "ms": [f"{1000 * seconds:.1f}" for _, seconds in points],
    }


def _known_document(file: Path, *keys: str) -> dict[str, Any] | None:
    """A JSON object with these keys; `None` if the file does not exist or does not have them."""
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) and set(keys) <= content.keys() else None


def _cells(values: Mapping[str, Any]) -> dict[str, str]:
    return {_cell(name): _cell(value) for name, value in values.items() if value is not None}


def _cell(value: Any) -> str:
    """The text of a table cell for a value."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
