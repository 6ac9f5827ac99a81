"""How far a run of responses is."""

from __future__ import annotations

import time

from tqdm import tqdm


class Progress:
    """A progress bar over prompts with tokens/s and time left."""

    def __init__(self, total: int | None, done: int, shown: bool = True) -> None:
        self.bar = tqdm(total=total, initial=done, unit="prompt", disable=not shown, mininterval=1.0, smoothing=0.05)
        if not self.bar.disable and not self.bar.fp.isatty():
            self.bar.mininterval = 20.0
        self.num_tokens = 0
        self.start_s = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(time.perf_counter() - self.start_s, 1e-9)

    def count(self, num_tokens: int, prompts: int) -> None:
        self.num_tokens += num_tokens
        self.bar.set_postfix_str(f"{self.tokens_per_second:.0f} tokens/s", refresh=False)
        self.bar.update(prompts)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()
