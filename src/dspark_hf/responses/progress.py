"""The progress bar of generating responses."""

from __future__ import annotations

import threading
import time

from tqdm import tqdm


class ResponseBar:
    """
    A progress bar over prompts that also counts tokens, so that it moves before the first prompt is finished.

    Args:
        total: Number of prompts.
        done: Prompts that were answered by an earlier run.
        shown: Whether to show the bar.
    """

    def __init__(self, total: int | None, done: int, shown: bool = True) -> None:
        self.bar = tqdm(total=total, initial=done, unit="prompt", disable=not shown, mininterval=1.0, smoothing=0.05)
        self.interval_s = 1.0
        if not self.bar.disable and not self.bar.fp.isatty():
            self.interval_s = self.bar.mininterval = 20.0
        self.num_tokens = 0
        self.start_s = self.shown_s = time.perf_counter()
        self._lock = threading.Lock()

    @property
    def text(self) -> str:
        """Tokens so far and tokens per second."""
        per_second = self.num_tokens / max(time.perf_counter() - self.start_s, 1e-9)
        return f"{self.num_tokens:,} tokens, {per_second:.0f} tokens/s"

    def add_tokens(self, count: int) -> None:
        """Counts new tokens; can be called from any thread."""
        with self._lock:
            self.num_tokens += count
            if time.perf_counter() - self.shown_s < self.interval_s:
                return
            self.shown_s = time.perf_counter()
        self.bar.set_postfix_str(self.text)

    def add_prompt(self) -> None:
        """Counts a finished prompt."""
        self.bar.update(1)

    def __enter__(self) -> ResponseBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.set_postfix_str(self.text, refresh=False)
        self.bar.close()
