"""vLLM's output side, in the actor's process: of a request that wants the log-probs of what it samples, it keeps these.

vLLM 0.32 keeps for each token the ids, log-probs, ranks and texts of all alternatives that were asked for, in six
lists, also if none was. That is half of what its output side does with a token, on the engine's own core.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor


def keep_sampled_logprobs_alone() -> None:
    """From now on the requests of this process that ask for `logprobs=0` in flat form, and for no text, get a list of
    floats, one a token, as `CompletionOutput.logprobs`; all others get what they got before.
    """
    output_processor.LogprobsProcessor = SampledLogprobs  # type: ignore[misc]  # a patch of vLLM


class SampledLogprobs(LogprobsProcessor):
    """Keeps the first log-prob of each row that a step gives, which is that of the sampled token."""

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
        """Take what one step sampled: as many rows as tokens, [T, 1]."""
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
