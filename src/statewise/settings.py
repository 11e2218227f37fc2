"""The plain settings of a recipe: model, batch, optimizer, budget, checkpoints, evaluation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from statewise.component import Component, parse
from statewise.errors import RecipeError


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Adapter(Settings):
    """LoRA through peft. `targets`: module names, or "all-linear". `rslora`, `dora`: peft's options of these names."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | list[str] = "all-linear"
    modules_to_save: list[str] = []
    rslora: bool = False
    dora: bool = False
    path: str | None = None


class SamplerSettings(Settings):
    """What samples from the policy; a text is the `engine`.

    engine: "built-in", or "vllm": in this process, or a server (`vllm serve`) at `url`, whose key is in the environment
    variable `api_key_env`. memory: share of the device for
    vLLM's weights and cache; max_length: longest sequence (the model's, without it); max_rows: sequences at once.
    folder: where weights and adapters are handed to a server, which must see it under the same name.
    gap: largest mean difference in nats between the engine's log-probabilities and the trainer's, of a few
    sequences after each hand-over; without it, 0.002 in float32, 0.02 in float16 and 0.1 in bfloat16.
    options: further arguments of vllm.LLM.
    """

    engine: Literal["built-in", "vllm"] = "built-in"
    url: str | None = None
    api_key_env: str | None = None
    memory: float = Field(0.3, gt=0, lt=1)
    max_length: int | None = Field(None, ge=2)
    max_rows: int = Field(256, ge=1)
    folder: str | None = None
    gap: float | None = Field(None, gt=0)
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"engine": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _of_the_engine(self) -> SamplerSettings:
        fields = type(self).model_fields
        given = [name for name, field in fields.items() if name != "engine" and getattr(self, name) != field.default]
        if self.engine == "built-in" and given:
            raise RecipeError(f"model.sampler.{given[0]}: belongs to engine = 'vllm'.")
        if self.url is None and self.folder is not None:
            raise RecipeError("model.sampler.folder: belongs to a server at `url`; in this process nothing is written.")
        own = [name for name in ("max_length", "options") if name in given]
        if self.url is not None and own:
            raise RecipeError(f"model.sampler.{own[0]}: is for vLLM in this process; give it to `vllm serve`.")
        return self


class ModelSettings(Settings):
    """`path`: "tiny" (the embedded base), a local directory or a hub id.

    `attention`: "auto" is transformers' choice, sdpa where the family has it. `head_dtype`: of the output head's products.
    """

    path: str = "tiny"
    revision: str | None = None
    gguf_file: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    adapter: Adapter | None = None
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    chat_template: str | None = None
    gradient_checkpointing: bool = False
    head_dtype: Literal["model", "float32"] = "model"
    sampler: SamplerSettings = SamplerSettings()


class BatchSettings(Settings):
    """`rollouts`: sequences a step over all ranks, in `minibatches` optimizer updates, used `epochs` times.

    A micro-batch holds at most `micro_tokens` padded tokens (or `micro_rows` rows) on a rank; `pack`: several sequences
    a row of this many tokens, without attention between them.
    """

    rollouts: int = Field(32, ge=1)
    minibatches: int = Field(1, ge=1)
    epochs: int = Field(1, ge=1)
    micro_tokens: int | None = Field(4096, ge=1)
    micro_rows: int | None = Field(None, ge=1)
    pack: int | None = Field(None, ge=2)

    @model_validator(mode="after")
    def _divides(self) -> BatchSettings:
        if self.rollouts % self.minibatches:
            raise RecipeError(
                f"batch.minibatches = {self.minibatches} does not divide batch.rollouts = {self.rollouts}."
            )
        return self


class Subspace(Settings):
    """Training inside the leading singular subspace of a change D = W_t - W_0, for every matrix of the blocks.

    from: a run, a checkpoint or a model, whose weights are W_t; "random": a subspace drawn from the seed. at: the run's
    step t (none: the last). base: W_0 (none: what the run started from; without a run, this recipe's model). rank: K.
    side: D V V^T ("right"), U U^T D ("left"), or both. mode: "gradient" projects what the optimizer gets, "update" what it
    does to the weights, decay included. modules: names such as "q_proj" (none: all). others: the remaining parameters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)

    origin: str = Field(alias="from", min_length=1)
    at: int | None = Field(None, ge=0)
    base: str | None = None
    rank: int = Field(ge=1)
    side: Literal["right", "left", "both"] = "right"
    mode: Literal["gradient", "update"] = "gradient"
    modules: list[str] = []
    others: Literal["frozen", "free"] = "frozen"

    def words(self) -> str:
        where = (
            "a random subspace" if self.origin == "random" else f"the leading subspace of the change to {self.origin}"
        )
        step = "" if self.at is None else f" at step {self.at}"
        return f"{self.mode} kept in {where}{step}, rank {self.rank}, side {self.side}; other parameters {self.others}"


class Rpsft(Settings):
    """coef x sum over matrices of ||U_k^T (W - W_0) V_k||_F^2, U_k and V_k the leading singular vectors of W_0.

    normalised: each matrix's term over ||U_k^T W_0 V_k||_F^2. Source: arXiv 2605.10973.
    """

    rank: int = Field(ge=1)
    coef: float = Field(1.0, gt=0, allow_inf_nan=False)
    normalised: bool = False
    modules: list[str] = []


class Extrapolate(Settings):
    """After the steps 1, 2, 4, 8 ...: W + factor k (W - W_before) for k = 1 .. candidates, while `task` gets no worse.

    W_before: what the last such step left. strict: the score must rise. Source: EffOPD, arXiv 2605.11739.
    """

    task: Component
    candidates: int = Field(5, ge=1)
    factor: float = Field(2.0, gt=0, allow_inf_nan=False)
    strict: bool = False
    modules: list[str] = []

    @field_validator("task", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        return parse("task", value, "optim.extrapolate.task")

    @field_serializer("task")
    def _plain(self, value: Component) -> Any:
        return value.to_plain()


class OptimSettings(Settings):
    """`schedule`: a name of transformers' get_scheduler; `warmup`: share of the budget below 1, steps from 1 on.

    `state`: "keep" starts with the optimizer state of the checkpoint that `model.path` names.
    """

    optimizer: Literal["adamw", "sgd", "adafactor", "adamw_8bit"] = "adamw"
    lr: float = Field(1e-4, ge=0, allow_inf_nan=False)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    clip_norm: float | None = Field(1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"] = "constant"
    warmup: float = Field(0.0, ge=0)
    options: dict[str, Any] = {}
    state: Literal["reset", "keep"] = "reset"
    subspace: Subspace | None = None
    rpsft: Rpsft | None = None
    extrapolate: Extrapolate | None = None

    def words(self) -> list[str]:
        """What is done around the optimizer's step, a line each."""
        lines = [] if self.subspace is None else [f"subspace:  {self.subspace.words()}"]
        if self.rpsft is not None:
            lines.append(
                f"penalty:   {self.rpsft.coef:g} x change of the top {self.rpsft.rank} directions of W_0 (RPSFT)"
            )
        if self.extrapolate is not None:
            task = self.extrapolate.task.describe()
            lines.append(
                f"extrapol.: after steps 1, 2, 4 ..., up to {self.extrapolate.candidates} times, gated by {task}"
            )
        return lines


class Budget(Settings):
    """The run ends at whichever comes first. `max_tokens` counts action tokens that may be trained.

    `max_flops`: operations of training, sampling and teachers, estimated as `training.usage` says.
    """

    max_steps: int | None = Field(None, ge=0)
    max_epochs: float | None = Field(None, gt=0)
    max_tokens: int | None = Field(None, ge=1)
    max_flops: float | None = Field(None, gt=0)
    max_seconds: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _some(self) -> Budget:
        if not self.model_dump(exclude_none=True):
            raise RecipeError(
                "budget: is empty; give at least one of max_steps, max_epochs, max_tokens, max_flops, max_seconds."
            )
        return self


class CheckpointSettings(Settings):
    """`every`: steps (0: at the end only). `keep_last`, `keep_every`, `keep_best` say which are not pruned."""

    every: int = Field(0, ge=0)
    keep_last: int = Field(2, ge=1)
    keep_every: int | None = Field(None, ge=1)
    keep_best: str | None = None
    higher_is_better: bool = True


PROBE = {"kind": "tiny:text", "count": 64, "name": "probe"}


class EvalSettings(Settings):
    """`tasks` at the start, at the end and every `every` steps (0: not in between).

    probe: cross-entropy on held-out text, a task that goes with `tasks` unless one of them is of that kind (default: 64
    short texts of the embedded tasks); "off": without.
    """

    tasks: list[Component] = []
    probe: Component | Literal["off"] | None = None
    every: int = Field(0, ge=0)
    at_start: bool = True
    at_end: bool = True
    batch_tokens: int = Field(8192, ge=1)

    @field_validator("tasks", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if not isinstance(value, list):
            raise RecipeError(f"eval.tasks: received {value!r}, expected a list of tasks.")
        return [parse("task", item, f"eval.tasks[{index}]") for index, item in enumerate(value)]

    @field_validator("probe", mode="before")
    @classmethod
    def _parse_probe(cls, value: Any) -> Any:
        return value if value in (None, "off") else parse("task", value, "eval.probe")

    @field_serializer("tasks")
    def _plain(self, value: list[Component]) -> Any:
        return [item.to_plain() for item in value]

    @field_serializer("probe")
    def _plain_probe(self, value: Any) -> Any:
        return value.to_plain() if isinstance(value, Component) else value

    def all_tasks(self) -> list[Component]:
        """The tasks and the probe."""
        if self.probe == "off" or any(getattr(task, "usual_purpose", None) == "probe" for task in self.tasks):
            return list(self.tasks)
        return [*self.tasks, self.probe or parse("task", PROBE, "eval.probe")]
