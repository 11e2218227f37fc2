"""Loading policies: the embedded base, a local directory (GGUF files and PEFT adapters too) or a hub id."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from statewise.errors import DataError, MissingExtra, RecipeError
from statewise.hub import prepare_hub
from statewise.settings import Adapter, ModelSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedPolicy:
    """A model with its tokenizer; `path` is what it was loaded from."""

    model: Any
    tokenizer: Any
    path: str

    @property
    def pad_id(self) -> int:
        return pad_id(self.tokenizer)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return stop_ids(self.model, self.tokenizer)


def pad_id(tokenizer: Any) -> int:
    """Any id will do, since padding is always masked: the pad token's, else the end token's, else 0."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """All ids at which generation ends: the tokenizer's and those of the model's generation config."""
    config = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = config if isinstance(config, list | tuple) else [config]
    return tuple(sorted({int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None}))


def read_stop_ids(settings: ModelSettings, tokenizer: Any) -> tuple[int, ...]:
    """What `stop_ids` would give for the loaded model, from its files alone."""
    from transformers import GenerationConfig

    model = empty_policy(settings)
    # Where none is stored, what the model's config implies stays.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(resolve(settings.path))
    return stop_ids(model, tokenizer)


def resolve(path: str) -> str:
    """The directory of the embedded base for "tiny", else the path as it is; the hub is made ready for one that is an id."""
    if path != "tiny":
        if not Path(path).exists():
            prepare_hub(path)
        return path
    from statewise.tiny import model_path

    return str(model_path())


def load_policy(settings: ModelSettings | str, *, device: str | None = None, trainable: bool = False) -> LoadedPolicy:
    """Load model and tokenizer. dtype "auto": the checkpoint's own, except that the embedded base trains in float32.

    A directory that holds a PEFT adapter is loaded on its base. Raises DataError where nothing can be loaded, MissingExtra
    where a GGUF file is named and the package for it is not installed.
    """
    settings = ModelSettings(path=settings) if isinstance(settings, str) else settings
    path = resolve(settings.path)
    base = base_of(path)
    adapter = Adapter(path=path) if base != path else settings.adapter
    model = _load_model(base, settings)
    tokenizer = _load_tokenizer(path, base, settings)
    if adapter is not None:
        model = _add_adapter(model, adapter, trainable)
    if device is not None:
        model = model.to(device)
    model.eval()
    return LoadedPolicy(model, tokenizer, settings.path)


def base_of(path: str) -> str:
    """What the PEFT adapter in a directory was trained on; the path itself where it holds none."""
    file = Path(path) / "adapter_config.json"
    return resolve(str(json.loads(file.read_text())["base_model_name_or_path"])) if file.is_file() else path


def load_tokenizer(settings: ModelSettings) -> Any:
    """The tokenizer that `load_policy` would load."""
    path = resolve(settings.path)
    return _load_tokenizer(path, base_of(path), settings)


def read_num_positions(settings: ModelSettings) -> int:
    """What `num_positions` would give for the loaded model, from its config alone."""
    from statewise.models.generate import num_positions

    return num_positions(
        empty_policy(settings.model_copy(update={"path": base_of(resolve(settings.path)), "adapter": None}))
    )


def empty_policy(settings: ModelSettings) -> Any:
    """The model's structure without its weights, adapter attached: for counting parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    extra: dict[str, Any] = {"gguf_file": settings.gguf_file} if settings.gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(resolve(settings.path), **extra)
    except (OSError, ValueError) as error:
        raise DataError(f"model '{settings.path}': its config can't be read: {error}") from error
    dtype = _dtype(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=config.dtype or torch.float32 if dtype == "auto" else dtype
        )
        return model if settings.adapter is None else _add_adapter(model, settings.adapter, True)


def _dtype(settings: ModelSettings) -> Any:
    """Of "auto": the checkpoint's own; the embedded base is stored in bf16 and computed in float32."""
    if settings.dtype == "auto" and settings.path == "tiny":
        return torch.float32
    return DTYPES.get(settings.dtype, "auto")


def _load_model(path: str, settings: ModelSettings) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = _dtype(settings)
    extra: dict[str, Any] = {"revision": settings.revision} if settings.revision else {}
    if settings.gguf_file:
        extra |= _gguf(settings.gguf_file)
    if settings.attention != "auto":
        extra["attn_implementation"] = settings.attention
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **extra)
    except (OSError, ValueError) as error:
        raise DataError(f"model '{path}': {_looked_for(path)}can't be loaded: {error}") from error
    for name, value in (("temperature", None), ("top_p", None), ("top_k", None), ("do_sample", False)):
        setattr(model.generation_config, name, value)
    return model


def _looked_for(path: str) -> str:
    return "" if Path(path).is_dir() else "there is no such directory, and as a hub id it "


def _gguf(file: str) -> dict[str, Any]:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MissingExtra("gguf", "gguf", f"reading {file}") from None
    from transformers import GgufConfig

    return {"gguf_file": file, "quantization_config": GgufConfig(dequantize=True)}


def _load_tokenizer(path: str, base: str, settings: ModelSettings) -> Any:
    from transformers import AutoTokenizer

    extra = {"gguf_file": settings.gguf_file} if settings.gguf_file else {}
    where = path if (Path(path) / "tokenizer_config.json").is_file() or path == base else base
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **extra)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer of '{where}': {_looked_for(where)}can't be loaded: {error}") from error
    if settings.chat_template is not None:
        file = Path(settings.chat_template)
        if not file.is_file():
            raise RecipeError(f"model.chat_template: no file '{file}'.")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def _add_adapter(model: Any, adapter: Adapter, trainable: bool) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter.path is not None:
        return PeftModel.from_pretrained(model, adapter.path, is_trainable=trainable)
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        target_modules=adapter.targets,
        modules_to_save=adapter.modules_to_save or None,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
