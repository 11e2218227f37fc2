"""What a scoring is made from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from statewise.component import parse
from statewise.settings import ModelSettings, Settings
from statewise.sources.dataset import DatasetSource


class ScoreSettings(Settings):
    """data: rows in TRL's formats; model: whose policy is asked; temperature: logits are divided by it.

    chunk_rows: rows that are sorted by length, batched and stored together, whoever scores them: so their bytes don't
    depend on how many processes there are. batch_tokens: padded tokens a forward pass (None: 1,024 on a CPU, else 8,192).
    head_dtype: of the output head's products; float32 also of a bf16 model, since bf16 logits are too coarse for phi.
    """

    data: DatasetSource
    model: ModelSettings = ModelSettings(head_dtype="float32")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    chunk_rows: int = Field(128, ge=1)
    batch_tokens: int | None = Field(None, ge=1)

    @field_validator("data", mode="before")
    @classmethod
    def _data(cls, value: Any) -> Any:
        """A text is the path, hub id or embedded task; a dict, fields of the source 'dataset'."""
        if isinstance(value, DatasetSource):
            return value
        plain = {"data": value} if isinstance(value, str) else value
        return parse("source", {"kind": "dataset", "shuffle": False, "max_length": None, **plain}, "data")

    @field_validator("model", mode="before")
    @classmethod
    def _model(cls, value: Any) -> Any:
        if isinstance(value, ModelSettings):
            return value
        plain = {"path": value} if isinstance(value, str) else value
        return {"head_dtype": "float32", **plain}


class Engine(Settings):
    """Who computes: `processes` of this machine, or Ray workers; none of it changes a result.

    threads: of each process (default: the processor's cores shared out; one process: torch's default).
    """

    processes: int = Field(1, ge=1)
    on: Literal["local", "ray"] = "local"
    device: str | None = None
    threads: int | None = Field(None, ge=1)
