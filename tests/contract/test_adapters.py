"""After a push of a policy with adapters, merged or alone, every engine computes what the learner computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from engines import (
    LORA,
    AlteredManifest,
    Engine,
    LocalSender,
    Model,
    dropped,
    new_learner,
    perturb_adapters,
    probe_gap,
    refusal,
    sampled_gap,
    weight_sync,
)
from fakes import pushes_of

from mobula.cluster.weight_sync.manifest import TensorSpec
from mobula.learner.learner import Learner

from .conftest import ENGINES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXACT = 1e-5  # nat, fp32
VISIBLE = 1e-2  # nat: a change of weights that a comparison cannot miss


@pytest.fixture(params=["vllm-untied", "vllm-tied", "huggingface"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["weights", "adapters"])
def adapted(request: pytest.FixtureRequest, engine_name: str, models: dict[str, Model]) -> Iterator[Learner]:
    """A learner with adapters on the checkpoint's weights, and what its pushes carry."""
    _, model = ENGINES[engine_name]
    learner = new_learner(models[model], *LORA, "sampler.temperature=0.8", f"weight_sync.payload={request.param}")
    yield learner
    learner.close()


async def test_the_engine_computes_what_the_learner_computes_at_every_version(engine: Engine, adapted: Learner) -> None:
    sync = weight_sync(engine, LocalSender(adapted))
    pushes = pushes_of(sync)
    assert await probe_gap(engine, adapted) <= EXACT, "adapters that are not trained yet change nothing"
    for version, (seed, scale) in enumerate(((11, 0.1), (12, 0.1), (0, 0.0)), start=1):
        perturb_adapters(adapted, seed, scale)
        assert await probe_gap(engine, adapted) > VISIBLE, "before the push the engine has other weights"
        assert await sync.publish(version) == version
        assert await probe_gap(engine, adapted) <= EXACT
        assert await sampled_gap(engine, adapted) <= EXACT
        group = await engine.sample(engine.model.probe)
        assert group.summary().tokens_by_version == {version: sum(t.num_steps for t in group.trajectories)}
    assert all(push.canary_gap <= EXACT for push in pushes)
    assert {push.num_bytes for push in pushes} == {adapted.manifest().num_bytes}


@pytest.mark.parametrize("adapted", ["adapters"], indirect=True)
async def test_a_late_joiner_gets_the_adapters_through_the_object_store(engine: Engine, adapted: Learner) -> None:
    perturb_adapters(adapted, seed=21)
    adapted.version = 7
    assert await probe_gap(engine, adapted) > VISIBLE
    assert await weight_sync(engine, LocalSender(adapted)).admit(engine.client) == 7
    assert await engine.client.weight_version() == 7
    assert await probe_gap(engine, adapted) <= EXACT


def of_another_rank(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return (*tensors[:3], replace(tensors[3], shape=(tensors[3].shape[0], 8)), *tensors[4:])


@pytest.mark.parametrize(("alter", "message"), [(dropped, "missing {third}"), (of_another_rank, "{third} is float32")])
@pytest.mark.parametrize("adapted", ["adapters"], indirect=True)
@pytest.mark.parametrize("engine_name", ["vllm-untied", "huggingface"])
async def test_adapters_that_do_not_fit_are_refused_by_name_before_a_byte_is_sent(
    engine: Engine, adapted: Learner, alter: Callable[..., tuple[TensorSpec, ...]], message: str
) -> None:
    third = adapted.manifest().tensors[3].name
    assert message.format(third=third) in await refusal(engine, AlteredManifest(adapted, alter))
