"""What settings of other trainers are called here, for the messages about unknown ones."""

from collections.abc import Iterable

from statewise.errors import nearest

NAMES = {
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype=bfloat16",
    "fp16": "model.dtype=float16",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "attn_implementation": "model.attention",
    "use_peft": "model.adapter={rank=16}",
    "lora_r": "model.adapter.rank",
    "lora_alpha": "model.adapter.alpha",
    "lora_dropout": "model.adapter.dropout",
    "lora_target_modules": "model.adapter.targets",
    "use_vllm": "model.sampler.engine=vllm",
    "vllm_server_base_url": "model.sampler.url",
    "dataset_name": "source.data",
    "dataset_config": "source.config",
    "dataset_train_split": "source.split",
    "max_length": "source.max_length",
    "max_seq_length": "source.max_length",
    "max_completion_length": "source.max_tokens",
    "max_new_tokens": "source.max_tokens",
    "num_generations": "source.group_size",
    "temperature": "source.temperature",
    "top_p": "source.top_p",
    "top_k": "source.top_k",
    "packing": "batch.pack",
    "per_device_train_batch_size": "batch.rollouts (sequences of an update over all devices)",
    "gradient_accumulation_steps": "batch.rollouts (micro-batches follow from batch.micro_tokens)",
    "num_iterations": "batch.epochs",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.clip_norm",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "num_train_epochs": "budget.max_epochs",
    "epochs": "budget.max_epochs",
    "max_steps": "budget.max_steps",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every",
    "beta": "objective.0.loss.beta, or a reference signal with its coef",
    "epsilon": "objective.0.loss.low and .high",
    "loss_type": "objective.0.loss",
    "scale_rewards": "signal.0.advantage",
    "reward_funcs": "signal.0.verifier",
    "filter_groups": "signal.0.zero_variance=refill",
    "max_num_gen_batches": "signal.0.max_draws (with signal.0.zero_variance=refill)",
    "report_to": "--track",
    "output_dir": "--out",
    "output": "--out",
    "resume_from_checkpoint": "--resume",
}


def here(name: str) -> str:
    """`; 'learning_rate' is optim.lr here`, or nothing for a name that is not known."""
    key = name.lstrip("-").replace("-", "_")
    return f"; {key} is {NAMES[key]} here." if key in NAMES else ""


def hint(name: str, known: Iterable[str]) -> str:
    """What is said after an unknown setting: its name here, else the nearest one, or all that are known."""
    return here(name) or nearest(name, known)
