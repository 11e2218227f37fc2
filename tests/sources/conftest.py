"""Small tokenizers built in code, as real models have them: with and without BOS, generation tags, an end token."""

from collections.abc import Callable
from typing import Any

import pytest

WORDS = "hello world how are you fine thanks what is two plus three it five bye now 2 3 4 5".split()  # noqa: SIM905
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<turn>", "<end_turn>"]

_TURN = "{{ '<|im_start|>' + m['role'] + '\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}" + _TURN + "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}" + _PROMPT
)  # as SmolLM2 has it: no generation tags


def tagged(inside: str, after: str, before: str = "") -> str:
    """ChatML whose assistant turns are `before`, then `inside` in a generation block, then `after`."""
    block = "{{ " + before + " }}" if before else ""
    return (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        + block
        + "{% generation %}{{ "
        + inside
        + " }}{% endgeneration %}{{ "
        + after
        + " }}{% else %}"
        + _TURN
        + "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + _PROMPT
    )


_HEAD = "'<|im_start|>assistant\n'"
TEMPLATES = {
    "chatml": CHATML,
    "tags": tagged("m['content'] + '<|im_end|>'", "'\n'", _HEAD),
    "tags_without_end": tagged("m['content']", "'<|im_end|>\n'", _HEAD),
    "tags_around_all": tagged(_HEAD + " + m['content'] + '<|im_end|>\n'", "''"),
    # The inference prompt ends with an empty think block, which the block of the turn holds too.
    "think": tagged("'<think></think>' + m['content'] + '<|im_end|>'", "'\n'", _HEAD).replace(
        "assistant\n' }}{% endif %}", "assistant\n<think></think>' }}{% endif %}"
    ),
    "no_end": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    # Llama 2: BOS as text before every exchange, an end after every answer.
    "llama2": "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}",
    # Gemma: BOS as text, another end token than EOS, only two roles.
    "gemma": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<turn>' + m['role'].replace('assistant', 'model') + '\n' + m['content'] + '<end_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}",
    # Phi 3: EOS once more at the end of a conversation.
    "phi": "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<end_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    # Qwen 3 with thinking off: an answer starts behind an empty block, of which the past keeps nothing.
    "opens": CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think></think>\n' }}{% endif %}"),
    # Qwen 3: reasoning is removed from all answers but the last.
    "forgets": "{% for m in messages %}" + _TURN + "{% if loop.last %}{{ m['content'] }}{% else %}"
    "{{ m['content'].split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + _PROMPT,
}


def build_tokenizer(
    template: str | None = None, *, eos: str = "</s>", adds_bos: bool = False, pad: str = "<pad>"
) -> Any:
    """Byte-level BPE of 500 tokens; `template`: a name of TEMPLATES."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "\n\n".join(WORDS)] * 9, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=[s for s in SPECIAL if s not in ("<s>", eos, pad)],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = None if template is None else TEMPLATES[template]
    return made


@pytest.fixture(scope="session")
def make() -> Callable[..., Any]:
    """`build_tokenizer`, each made once; a test must not change one."""
    known: dict[Any, Any] = {}

    def get(template: str | None = None, **settings: Any) -> Any:
        key = (template, *sorted(settings.items()))
        if key not in known:
            known[key] = build_tokenizer(template, **settings)
        return known[key]

    return get
