"""The measurements of a run on the disk: one JSON line for each finished prompt and method."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..generation.telemetry import Round
from ..storage.json_lines import ResumableLines

_ROUND_FIELDS = tuple(f.name for f in fields(Round))


@dataclass
class Turn:
    """
    One answer.

    Args:
        output_ids: The answer's tokens.
        seconds, prefill_s: As in [`~dspark_hf.evaluation.meter.Meter`].
        passes: Tokens fed to each pass of the target after the prompt's.
        peak_bytes: Peak memory.
        rounds: The rounds of our decoding loop; empty for other methods.
    """

    output_ids: list[int]
    seconds: float
    prefill_s: float
    passes: list[int]
    peak_bytes: int | None = None
    rounds: list[Round] = field(default_factory=list)


@dataclass
class Record:
    """One prompt answered by one method: all its turns."""

    task: str
    prompt: int
    method: str
    turns: list[Turn]

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task, self.prompt, self.method

    @property
    def rounds(self) -> list[Round]:
        return [r for turn in self.turns for r in turn.rounds]


@dataclass
class Difference:
    """
    Where a greedy answer first differs from that of plain `generate`.

    Args:
        task, prompt, method: Which answer.
        turn, position: The turn, and the token within its answer, both from 0.
        expected, got: The token of plain `generate` and of the method; `None` for an answer that had ended.
        gap: The target's logit of `expected` minus that of `got`, in a pass over the whole prefix. Near 0 it is a tie that
            rounding decides; if large, it is an error. `None` where one answer is the start of the other.
    """

    task: str
    prompt: int
    method: str
    turn: int
    position: int
    expected: int | None
    got: int | None
    gap: float | None


class RecordFile:
    """
    The measurements of a `bench` or `sweep` run on the disk, from which an interrupted run resumes.

    Args:
        path: The file, created if it does not exist; see [`~dspark_hf.storage.json_lines.ResumableLines`].
        settings: What the measurements depend on.

    Raises:
        ValueError: naming the settings that differ from those of the measurements in the file.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.records: dict[tuple[str, int, str], Record] = {}
        self.differences: list[Difference] = []
        self.checked: set[tuple[str, int, str]] = set()
        self._lines = ResumableLines(path, settings, kinds=("record", "check"))
        for line in self._lines.written:
            self._take(line)

    def close(self) -> None:
        self._lines.close()

    def add(self, record: Record) -> None:
        """Writes a finished measurement."""
        line = asdict(record)
        for turn, written in zip(record.turns, line["turns"], strict=True):
            written["rounds"] = pack_rounds(turn.rounds)
        self._take({"record": line})
        self._lines.append({"record": line})

    def add_check(self, key: tuple[str, int, str], difference: Difference | None) -> None:
        """Writes the result of comparing an answer with that of plain `generate`."""
        line = {"check": {"key": list(key), "difference": None if difference is None else asdict(difference)}}
        self._take(line)
        self._lines.append(line)

    # ------------------------------------------------------------------ helpers

    def _take(self, line: dict[str, Any]) -> None:
        if "record" in line:
            fields_ = line["record"]
            turns = [Turn(**(turn | {"rounds": unpack_rounds(turn["rounds"])})) for turn in fields_["turns"]]
            record = Record(**(fields_ | {"turns": turns}))
            self.records[record.key] = record
        else:
            task, prompt, method = line["check"]["key"]
            self.checked.add((task, prompt, method))
            if line["check"]["difference"] is not None:
                self.differences.append(Difference(**line["check"]["difference"]))


def pack_rounds(rounds: list[Round]) -> dict[str, list[Any]]:
    """Rounds as one list per field, which takes a fraction of the space."""
    packed = {name: [vars(r)[name] for r in rounds] for name in _ROUND_FIELDS}
    for name, values in packed.items():
        if name.endswith("_s"):
            packed[name] = [round(value, 7) for value in values]
        elif name == "confidence":
            packed[name] = [[round(c, 6) for c in confidence] for confidence in values]
    return packed


def unpack_rounds(packed: dict[str, list[Any]]) -> list[Round]:
    """The inverse of [`pack_rounds`], up to rounding."""
    known = {name: values for name, values in packed.items() if name in _ROUND_FIELDS}
    return [Round(**dict(zip(known, values, strict=True))) for values in zip(*known.values(), strict=True)]
