"""The judge in a vLLM engine of the reward worker's: replies of a real engine, and by name what has no score."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import engine_judge
import pytest
from tiny_reward_models import encoded_image

from mobula.cluster.records.trajectory import Response
from mobula.configs.load import load_config
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.contract import FailureKind, RewardRequest, Score, ScoringFailure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
}
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("judge") / "model")


@pytest.fixture(scope="module")
def apart() -> Iterator[Call]:
    """Calls a function in one process of its own: an engine leaves its mark on torch and on the process group."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            yield lambda function, *args, **kwargs: process.submit(function, *args, **kwargs).result()


def request(text: str, *images: bytes, drawn: tuple[bytes, ...] = ()) -> RewardRequest:
    return RewardRequest(Response(text, 1, False, drawn), (), {}, "What is it?", images)


def test_a_batch_is_scored_and_each_flaw_costs_its_own_response(apart: Call, model: Path) -> None:
    one, two, three = (encoded_image(seed) for seed in (1, 2, 3))
    requests = [
        request("four"),
        request("x" * 3000, one),
        request("noise", one),
        request("noise", one, two, three),
        request("noise", b"nothing"),
        request("noise", one, two),
    ]
    found = apart(engine_judge.outcomes, model, requests)
    assert [isinstance(outcome, Score) for outcome in found] == [True, False, True, False, False, True]
    assert all(1 <= found[i].value <= 5 and found[i].reason == f"Score: {found[i].value:g}" for i in (0, 2, 5))
    reasons = [outcome.reason for outcome in found if isinstance(outcome, ScoringFailure)]
    assert "maximum context length is 512 tokens" in reasons[0]
    assert "At most 2 encoded_image(s)" in reasons[1]
    assert "image 1 of the prompt is no PNG" in reasons[2]
    alone = [apart(engine_judge.outcomes, model, [asked])[0] for asked in requests]
    assert [outcome for outcome in alone if isinstance(outcome, Score)] == [found[0], found[2], found[5]]


def test_the_engine_sees_the_images_of_a_response(apart: Call, model: Path) -> None:
    drawn = {"images": "response", "template": "Rate it.", "extra": {}, "verdict": "last_line"}
    asked = [request("", drawn=(encoded_image(seed),)) for seed in range(6)]
    replies = [outcome.reason for outcome in apart(engine_judge.outcomes, model, asked, **drawn)]
    assert len(set(replies)) > 1, "greedy replies differ by nothing but the image"
    frames = request("", drawn=(encoded_image(0), encoded_image(1), encoded_image(2)))
    whole, cut = (apart(engine_judge.outcomes, model, [frames], **drawn, frame_stride=n)[0] for n in (1, 3))
    assert "At most 2 encoded_image(s)" in whole.reason
    assert cut.reason == replies[0], "of three frames the first is shown"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"extra": {"ignore_eos": True}}, "gave no score (nothing matches the verdict's expression; its reply was cut"),
        ({"extra": {"structured_outputs": {"regex": "Score: [7-9]"}}}, "is not between 1 and 5"),
        ({"extra": {"structured_outputs": {"choice": ["good"]}}}, "gave no score"),
    ],
)
def test_no_verdict_is_a_failure_and_no_number(apart: Call, model: Path, options: Any, reason: str) -> None:
    (found,) = apart(engine_judge.outcomes, model, [request("four")], **options)
    assert isinstance(found, ScoringFailure) and found.kind is FailureKind.FAILED and reason in found.reason


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"engine": {"dtype": "float32"}}, "options.engine has dtype, which the judge sets itself"),
        ({"engine": {"max_modl_len": 8}}, "'max_modl_len', which vLLM does not know (did you mean 'max_model_len'?)"),
        ({"extra": {"n": 2}}, "options.extra has n, which the judge sets itself"),
        ({"extra": {"top": 2}}, "does not fit vLLM's SamplingParams"),
        ({"extra": {"top_p": 2.0}}, "top_p must be in (0, 1]"),
        ({"template": "Grade {question}"}, "no {response}"),
        ({"minimum": 5}, "not below maximum"),
        ({"model": "/tmp/no-such-judge"}, "options.model='/tmp/no-such-judge' cannot be loaded"),
    ],
)
def test_unfit_options_are_refused_before_a_model_is_loaded(
    apart: Call, model: Path, options: dict[str, Any], match: str
) -> None:
    words = dict(options)
    assert match in apart(engine_judge.refusal, Path(words.pop("model", model)), **words)


def test_a_checkpoint_without_its_weights_is_refused(apart: Call, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    found = apart(engine_judge.refusal, tmp_path / "empty")
    assert "cannot be loaded with options.engine (RuntimeError: Cannot find any model weights" in found, found


def test_two_judges_of_one_checkpoint_share_its_engine_and_torch_stays_as_it_was(apart: Call, model: Path) -> None:
    is_shared, is_as_before, refused = apart(engine_judge.shared, model)
    assert is_shared and is_as_before
    assert "differs from" in refused and "give both the same" in refused


def test_a_late_engine_costs_its_batch_and_is_counted_until_it_comes_back(apart: Call, model: Path) -> None:
    found, num_stuck, after = apart(engine_judge.late, model, [request("four"), request("five")])
    assert [outcome.kind for outcome in found] == [FailureKind.TIMED_OUT] * 2
    assert "2 replies of the judge" in found[0].reason and num_stuck == 1
    assert all(isinstance(outcome, Score) for outcome in after)


def test_an_engine_that_fails_is_an_error_of_the_worker_and_of_no_response(apart: Call, model: Path) -> None:
    """The last test of the module: the engine is not used again."""
    first, second, travels = apart(engine_judge.lost, model, [request("four")])
    assert "its engine failed: RuntimeError: an illegal memory access at" in first
    assert second == first and travels


def test_the_pool_is_asked_what_the_server_is_asked() -> None:
    words = ("experiment=sd3_5_ocr_grpo", "data.path=some/folder")
    served, pooled = (load_config([*words, f"rewards={name}"]) for name in ("unified_judge", "unified_judge_pool"))
    (server,), (pool,) = served.rewards.components, pooled.rewards.components
    same = ("system", "template", "images", "verdict", "minimum", "maximum", "max_tokens", "temperature", "extra")
    assert [server.options[name] for name in same] == [pool.options[name] for name in same]
    assert (pool.service, pooled.resources.reward_services["judge"].num_gpus) == ("judge", 1)
    assert not served.resources.reward_services
