"""Rows over ranks: each rank fetches its share, ranks share the tokens of rows, and media of every kind are mixed."""

from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from backend_run import config_of, connected, equal, weights
from family_ranks import BACKENDS, update_all
from learner_data import image, prompt, random_groups, tiny_config
from scored_rows import HOT, family_prompts, kept_bytes, tree
from tiny_checkpoints import write_text_policy
from transformers import AutoTokenizer

from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.learner import batch
from mobula.learner.learner import Learner
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import TINY, write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.shares import StepGroups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

UNSPLIT = ("qwen3.5", "gemma3")  # layers with a state, a mask for images: refused by name
NAMES = [name for name in TINY if name != "smolvlm" or importlib.util.find_spec("num2words")]
SPLIT = [name for name in NAMES if name not in UNSPLIT]
IMAGE_FAMILIES = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "internvl3", "glm4v")
MODELS = {"one": NAMES, "fsdp2": NAMES, "halves": SPLIT, "exchanged": IMAGE_FAMILIES, "zero3": IMAGE_FAMILIES}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below `one` and the name of each backend, what its ranks made of each model. Ranks that wait for each other run
    into the test's timeout."""
    out = tmp_path_factory.mktemp("ranks")
    for name in NAMES:
        write_tiny(name, out / name, seed=1)
    multiprocessing.set_forkserver_preload(["family_ranks"])
    for backend, names in MODELS.items():
        (out / backend).mkdir()
        # DeepSpeed keeps process groups of a model that is gone: processes of its own for each.
        for some in [[name] for name in names] if backend == "zero3" else [names]:
            arguments, num_ranks = (backend, some, out, out / backend), 2 if backend in BACKENDS else 1
            mp.start_processes(update_all, args=arguments, nprocs=num_ranks, start_method="forkserver")
    return out


@pytest.mark.families
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend in ("fsdp2", "exchanged", "zero3") for name in MODELS[backend]]
)
def test_two_ranks_equal_one(ran: Path, backend: str, name: str) -> None:
    one, two = (torch.load(ran / folder / f"{name}.pt") for folder in ("one", backend))
    assert equal(one["after"], two["after"], atol=2e-6)
    assert not equal(one["after"], one["before"], atol=2e-5)
    assert two["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-4)


@pytest.mark.families
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_with_a_part_of_each_row_equal_one(ran: Path, name: str) -> None:
    one, halves = (torch.load(ran / folder / f"{name}.pt") for folder in ("one", "halves"))
    assert equal(one["after"], halves["after"], atol=1e-6)
    assert halves["metrics"] == pytest.approx(one["metrics"], rel=1e-5, abs=1e-6)


NUM_TOKENS = 2048

LENGTHS = (50, 3, 17, 1, 30)  # of the targets of rows; together with their contexts no multiple of 4

FAMILIES = ("qwen3", "gemma3_text")  # the latter has a window of 16 tokens

TREES = ("qwen2.5", "qwen3-vl")  # the latter has features of images for several layers

CPU = torch.device("cpu")


def _of_length(num_tokens: int, num_targets: int) -> TokenSequence:
    ids = torch.randint(0, 200, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).numpy()
    return TokenSequence(ids, num_tokens - num_targets, (), ())


def _rank(rank: int, num_ranks: int, out: Path) -> None:
    """Writes log-probs of rows of each family, and the bytes that autograd keeps of one forward pass of a long row."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / f"store-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    ranks = SequenceRanks(num_ranks, CPU) if num_ranks > 1 else None
    reader = MediaReader(timeout_s=1.0, max_items=1)
    for name in FAMILIES:
        folder = out / name
        config = tiny_config(folder, "learner.packing=true").learner
        policy = TokenPolicy(load_model(str(folder), torch.float32, "sdpa").train(), config, ranks)
        batch = collate([_of_length(10 + length, length) for length in LENGTHS], reader, CPU)
        long = collate([_of_length(NUM_TOKENS, NUM_TOKENS // 2)], reader, CPU)
        kept = kept_bytes(partial(policy, long, PLAIN), policy.parameters())
        torch.save((policy(batch, PLAIN), kept), out / f"{name}-{num_ranks}-{rank}")
    for name in TREES:
        of = f"{num_ranks}-{rank}"
        torch.save(_of_tree(ranks, out / name, out / f"{name}-media-{of}"), out / f"tree-{name}-{of}")
    for is_frozen in (False, True):
        torch.save(_of_images(ranks, out / "images", is_frozen), out / f"images-{is_frozen}-{num_ranks}-{rank}")
    dist.destroy_process_group()


def _of_tree(
    ranks: SequenceRanks | None, model: Path, media: Path
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs and entropies of rows that share prefixes, and the gradients of all ranks; one rank shares nothing."""
    config = tiny_config(model, f"learner.share_prompts={str(ranks is not None).lower()}").learner
    policy = TokenPolicy(load_model(str(model), torch.float32, "sdpa").train(), config, ranks)
    media.mkdir()
    asked = [case.prompt for case in family_prompts(model, media).cases.values()]
    batch = collate(tree(asked), MediaReader(timeout_s=1.0, max_items=12), CPU)
    output = policy(batch, HOT, entropy_has_gradient=True)
    (output.logprobs.sum(1).mean() + output.entropy.mean()).backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return [output.logprobs.detach(), output.entropy.detach()], gradients


def _of_images(ranks: SequenceRanks | None, model: Path, is_frozen: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """The patches that this rank's vision tower takes of rows with five images, and the gradients of all ranks."""
    policy = TokenPolicy(load_model(str(model), torch.float32, "sdpa").train(), tiny_config(model).learner, ranks)
    tower = policy.model.get_submodule("model.visual")
    tower.requires_grad_(not is_frozen)
    num_patches: list[int] = []
    tower.register_forward_pre_hook(lambda _, args: num_patches.append(len(args[0])))
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [prompt(tokenizer, f"p{n}", [image(n), image(4)]) for n in range(4)]
    batch = collate([TokenSequence.of_prompt(one) for one in prompts], MediaReader(timeout_s=1.0, max_items=8), CPU)
    (policy(batch, PLAIN).logprobs * batch.target_mask).mean().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return sum(num_patches), gradients


@pytest.fixture(scope="module")
def split_rows_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("split")
    for name in FAMILIES:
        write_text_policy(out / name, name)
    write_tiny_qwen2_5_vl(out / "images", seed=0)
    for name in TREES:
        write_tiny(name, out / name)
    multiprocessing.set_forkserver_preload(["scored_rows"])
    for num_ranks in (1, 2, 4):
        mp.start_processes(_rank, args=(num_ranks, out), nprocs=num_ranks, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_has_the_outputs_of_whole_rows(split_rows_run: Path, name: str) -> None:
    whole, _ = torch.load(split_rows_run / f"{name}-1-0", weights_only=False)
    for num_ranks, rank in [(2, 0), (2, 1), (4, 0), (4, 3)]:
        split, _ = torch.load(split_rows_run / f"{name}-{num_ranks}-{rank}", weights_only=False)
        torch.testing.assert_close(split.logprobs, whole.logprobs, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(split.entropy, whole.entropy, atol=1e-6, rtol=1e-6)
        assert torch.equal(split.is_argmax, whole.is_argmax)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_of_two_ranks_keeps_at_most_six_tenths_of_a_row(split_rows_run: Path, name: str) -> None:
    _, whole = torch.load(split_rows_run / f"{name}-1-0", weights_only=False)
    for rank in range(2):
        _, kept = torch.load(split_rows_run / f"{name}-2-{rank}", weights_only=False)
        assert kept <= 0.6 * whole


@pytest.mark.parametrize("name", TREES)
def test_ranks_that_share_tokens_share_prefixes_of_rows(split_rows_run: Path, name: str) -> None:
    outputs, gradients = torch.load(split_rows_run / f"tree-{name}-1-0")
    for num_ranks, rank in [(2, 0), (2, 1), (4, 3)]:
        own, summed = torch.load(split_rows_run / f"tree-{name}-{num_ranks}-{rank}")
        for found, expected in zip(own, outputs, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(summed[parameter], gradient, atol=1e-5, rtol=1e-5, msg=parameter)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_ranks_encode_each_image_once_and_have_the_gradients_of_one(split_rows_run: Path, is_frozen: bool) -> None:
    whole, expected = torch.load(split_rows_run / f"images-{is_frozen}-1-0")
    assert any("visual" in name for name in expected) is not is_frozen
    for num_ranks in (2, 4):
        seen = [torch.load(split_rows_run / f"images-{is_frozen}-{num_ranks}-{rank}") for rank in range(num_ranks)]
        assert sum(num_patches for num_patches, _ in seen) == whole
        assert all(0 < num_patches < whole for num_patches, _ in seen)
        for name, gradient in expected.items():
            torch.testing.assert_close(seen[0][1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


TWO = ("learner=fsdp2", "resources.learner.num_workers=2")

EPOCHS = ("algorithm=reinforce_pp", "algorithm.kl.coef=0.05", "algorithm.num_epochs=2", "algorithm.num_minibatches=2")
EPOCHS += ("algorithm.old_logprobs=recomputed", "algorithm.entropy.top_share=0.5")
EPOCHS += ("algorithm.shaping.repetition_penalty=0.1",)
CASES = {
    "share": (),
    "epochs": EPOCHS,
    "critic": ("algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.critic.learning_rate=1e-3"),
}


@dataclass(frozen=True)
class Filed:
    """Stands for an object reference: a value in a file."""

    path: Path


def filed(groups: Sequence[ScoredGroup], folder: Path) -> list[ScoredGroup]:
    """The groups with references in the place of values, and with reference log-probs."""
    folder.mkdir()
    rng, found = np.random.default_rng(0), []
    for n, scored in enumerate(groups):
        logprobs = [rng.normal(-5, 0.1, size=t.num_steps).astype(np.float32) for t in scored.group.trajectories]
        for name, value in (("group", scored.group), ("logprobs", logprobs)):
            (folder / f"{n}-{name}").write_bytes(pickle.dumps(value))
        group, reference = Filed(folder / f"{n}-group"), Filed(folder / f"{n}-logprobs")
        found.append(replace(scored, group=group, reference_logprobs=reference))
    return found


class AllGroups:
    """In the place of a ShareFetcher: every rank fetches everything."""

    def fetch(self, entries: StepGroups) -> list[list[Any]]:
        return entries.fetch(range(len(entries)))


def train(rank: int, words: Sequence[str], model: Path, steps: Sequence[Sequence[ScoredGroup]], out: Path) -> None:
    """Three updates; each rank writes what it fetched, and rank 0 what came out."""
    num_bytes = 0

    def fetch(references: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
        nonlocal num_bytes
        contents = [reference.path.read_bytes() for reference in references]
        num_bytes += sum(map(len, contents))
        return [pickle.loads(content) for content in contents]

    batch.fetch_or_miss = fetch
    seen = {}
    for way in ("shares", "everything"):
        (out / way).mkdir(exist_ok=True)
        num_bytes = 0
        ranked = connected(Learner(config_of(model, *TWO, *words), rank, 2, (250,)), rank, 2, out / way / "address")
        ranked.begin_rl()
        if way == "everything":
            ranked.steps._parts = replace(ranked.steps._parts, shares=AllGroups())
        metrics = [dict(ranked.update(groups, n + 1).metrics) for n, groups in enumerate(steps)]
        seen[way] = (metrics, weights(ranked), num_bytes)
        ranked.close()
    torch.save(seen, out / f"seen-{rank}.pt")


def _transport_rank(rank: int, model: Path, steps: Sequence[Sequence[ScoredGroup]], out: Path) -> None:
    torch.set_num_threads(1)
    for name, words in CASES.items():
        train(rank, words, model, steps, out / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below each case's name what its ranks saw."""
    out = tmp_path_factory.mktemp("transport")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [filed(random_groups(tokenizer, 9, 3, seed=seed, longest=40), out / f"step-{seed}") for seed in range(3)]
    for name in CASES:
        (out / name).mkdir()
    multiprocessing.set_forkserver_preload(["backend_run"])
    mp.start_processes(_transport_rank, args=(model, steps, out), nprocs=2, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_the_same_bit_for_bit(folder: Path, name: str) -> None:
    seen = torch.load(folder / name / "seen-0.pt")
    metrics, found, _ = seen["shares"]
    expected_metrics, expected, _ = seen["everything"]
    assert metrics == expected_metrics
    assert equal(found, expected, atol=0)
    assert all(step["grad_norm"] > 0 for step in metrics)


def test_a_rank_fetches_its_share_alone(folder: Path) -> None:
    ranks = [torch.load(folder / "share" / f"seen-{rank}.pt") for rank in range(2)]
    everything = ranks[0]["everything"][2]
    assert ranks[1]["everything"][2] == everything
    own = [rank["shares"][2] for rank in ranks]
    assert max(own) < 0.9 * everything, "images lie in the groups here, and one rank has most of them"
    assert everything <= sum(own) < 1.25 * everything
