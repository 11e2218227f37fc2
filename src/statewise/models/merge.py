"""A LoRA put into its base model's weights: an ordinary model directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from statewise.errors import RunError
from statewise.files import naming, open_to_others, sync
from statewise.models.load import DTYPES, base_of, load_policy
from statewise.settings import ModelSettings


def merge(checkpoint: str | Path, out: str | Path, dtype: str = "auto") -> str:
    """Write W0 + scale B A of the adapter in the directory `checkpoint` as a model to `out`; returns the type of its weights.

    The sum is taken in float32 and rounded once, to `dtype` ("auto": that of the base's files). Model and tokenizer are what
    from_pretrained and vLLM read. Raises RunError where `checkpoint` holds no adapter, or where there is something at `out`.
    """
    target = Path(out)
    if target.exists():
        raise RunError(f"--out {out}: exists; choose another directory.")
    path = str(checkpoint)
    if not Path(path).is_dir():
        raise RunError(f"{checkpoint}: is no directory; expected a run, or a directory with a PEFT adapter.")
    base = base_of(path)
    if base == path:
        raise RunError(
            f"{checkpoint}: holds no adapter, so there is nothing to merge; a checkpoint of whole weights is a model already."
        )
    policy = load_policy(ModelSettings(path=path, dtype="float32"))
    name = _stored(base) if dtype == "auto" else dtype
    model = policy.model.merge_and_unload().to(DTYPES[name])
    aside = target.with_name(f".{target.name}.{os.urandom(6).hex()}.tmp")
    try:
        with naming(target):
            model.save_pretrained(aside)
            policy.tokenizer.save_pretrained(aside)
            open_to_others(aside)
            os.replace(aside, target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return name


def _stored(base: str) -> str:
    """The type of a model's files, by its config."""
    from transformers import AutoConfig

    stored: Any = AutoConfig.from_pretrained(base).dtype
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "float32")
