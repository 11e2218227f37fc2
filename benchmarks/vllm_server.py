"""vLLM in an environment of its own: reads one JSON line {"model", "max_tokens", "stop_ids", "prompts", "dtype"}, and samples
all prompts each time another line comes; writes one JSON line {"completions", "logprobs", "seconds"} each time.

Started by `python -m benchmarks.rollouts --vllm PYTHON`; needs only vllm.
"""

import json
import os
import sys
import time


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not reach the answers
    from vllm.inputs import TokensPrompt

    from vllm import LLM, SamplingParams

    task = json.loads(sys.stdin.readline())
    longest = max(map(len, task["prompts"])) + task["max_tokens"]
    llm = LLM(task["model"], dtype=task["dtype"], max_model_len=longest, enforce_eager=True, generation_config="vllm")
    law = SamplingParams(
        temperature=1.0, max_tokens=task["max_tokens"], stop_token_ids=task["stop_ids"], logprobs=0, detokenize=False
    )
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in task["prompts"]]
    print(json.dumps("ready"), file=out, flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        rows = [answer.outputs[0] for answer in llm.generate(prompts, law, use_tqdm=False)]
        seconds = time.perf_counter() - started
        logprobs = [[at[t].logprob for t, at in zip(r.token_ids, r.logprobs, strict=True)] for r in rows]
        answer = {"completions": [list(r.token_ids) for r in rows], "logprobs": logprobs, "seconds": seconds}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
