"""Patch of vLLM's output side in the actor's process: keeps only the log-probs of sampled tokens.

vLLM 0.32 keeps ids, log-probs, ranks and texts of all requested alternatives per token, in six lists, even without
alternatives. These are half of the output side's work per token, on the CPU core of the engine.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor


def keep_sampled_logprobs_alone() -> None:
    """Patches this process: requests with `logprobs=0` in flat form and without text get one float per token as
    `CompletionOutput.logprobs`; other requests are unchanged.
    """
    output_processor.LogprobsProcessor = SampledLogprobs  # type: ignore[misc]  # a patch of vLLM


class SampledLogprobs(LogprobsProcessor):
    """Keeps the first log-prob of each row of a step, the log-prob of the sampled token."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> LogprobsProcessor:
        params = request.sampling_params
        asks_for_texts = tokenizer is not None
        if asks_for_texts or params.logprobs != 0 or not params.flat_logprobs or params.prompt_logprobs is not None:
            return LogprobsProcessor.from_new_request(tokenizer, request)
        return cls(
            tokenizer=None,
            logprobs=[],
            prompt_logprobs=None,
            cumulative_logprob=None,
            num_logprobs=0,
            num_prompt_logprobs=None,
        )

    def update_from_output(self, output: Any) -> None:
        """Appends the log-probs of one step, [T, 1]."""
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
