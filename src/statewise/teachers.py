"""Settings of a model other than the policy: what to load, or which server to ask."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from statewise.errors import RecipeError
from statewise.settings import ModelSettings, Settings


class TeacherModel(Settings):
    """A model other than the policy; a text is its `path`, or its `endpoint` where it begins with http:// or https://.

    path: a run (its last checkpoint), a model directory or a hub id; a LoRA on the policy's own frozen base shares the
    base's weights. "step0": the policy before its first update. "ema": the average theta' <- decay theta' +
    (1 - decay) theta, taken after every update.
    endpoint: instead, the address of an OpenAI-compatible server, or $NAME of an environment variable that holds it;
    `model` is its name there, and the settings after it say how to ask (`statewise.models.http.Client`).
    """

    path: str = ""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    decay: float | None = Field(None, ge=0, lt=1)
    endpoint: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = Field(16, ge=1)
    connect_seconds: float = Field(10.0, gt=0)
    timeout_seconds: float = Field(300.0, gt=0)
    retries: int = Field(8, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return {"endpoint": value} if value.startswith(("http://", "https://")) else {"path": value}

    @model_validator(mode="after")
    def _one_place(self) -> TeacherModel:
        if bool(self.path) == (self.endpoint is not None):
            raise RecipeError(
                f"teacher: received path = '{self.path}' and endpoint = {self.endpoint!r}; expected one of them: a model to "
                'load, or the address of a server, such as { endpoint = "http://host:8000/v1", model = "name" }.'
            )
        loading = {"revision", "dtype", "attention", "decay"}
        asking = {"model", "api_key_env", "concurrency", "connect_seconds", "timeout_seconds", "retries"}
        default = {name: field.default for name, field in type(self).model_fields.items()}
        stray = sorted(n for n in (asking if self.path else loading) if getattr(self, n) != default[n])
        if stray:
            raise RecipeError(
                f"teacher.{stray[0]}: belongs to a teacher with {'an endpoint' if self.path else 'a path'}; this one is "
                f"'{self.name}'."
            )
        return self

    @model_validator(mode="after")
    def _of_the_average(self) -> TeacherModel:
        if (self.path == "ema") != (self.decay is not None):
            raise RecipeError(
                f"teacher: received path = '{self.path}' and decay = {self.decay}; `decay` belongs to path = 'ema', which "
                "needs it, such as { path = 'ema', decay = 0.99 }."
            )
        return self

    @model_serializer(mode="wrap")
    def _to_text(self, handler: Any) -> Any:
        """The path alone, where nothing else is set."""
        return self.path if self == type(self).model_construct(path=self.path) else handler(self)

    @property
    def name(self) -> str:
        """For messages."""
        return self.path or " at ".join(part for part in (self.model, self.endpoint) if part)

    @property
    def is_past_policy(self) -> bool:
        """Whether it is the policy itself at earlier steps."""
        return self.path in ("step0", "ema")

    def model_settings(self) -> ModelSettings:
        return ModelSettings(path=self.path, revision=self.revision, dtype=self.dtype, attention=self.attention)
