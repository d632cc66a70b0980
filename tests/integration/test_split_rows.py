"""Ranks that share the tokens of rows compute the same log-probs, and keep a share of activations and images each."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from family_prompts import family_prompts
from kept_bytes import kept_bytes
from learner_data import image, prompt, tiny_config
from scored_rows import HOT, tree
from tiny_text_models import write_text_policy
from transformers import AutoTokenizer

from mobula.cluster.records.media import MediaReader
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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
        torch.save(
            _of_tree(ranks, out / name, out / f"{name}-media-{num_ranks}-{rank}"),
            out / f"tree-{name}-{num_ranks}-{rank}",
        )
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
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("split")
    for name in FAMILIES:
        write_text_policy(out / name, name)
    write_tiny_qwen2_5_vl(out / "images", seed=0)
    for name in TREES:
        write_tiny(name, out / name)
    multiprocessing.set_forkserver_preload(["kept_bytes"])
    for num_ranks in (1, 2, 4):
        mp.start_processes(_rank, args=(num_ranks, out), nprocs=num_ranks, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_has_the_outputs_of_whole_rows(ran: Path, name: str) -> None:
    whole, _ = torch.load(ran / f"{name}-1-0", weights_only=False)
    for num_ranks, rank in [(2, 0), (2, 1), (4, 0), (4, 3)]:
        split, _ = torch.load(ran / f"{name}-{num_ranks}-{rank}", weights_only=False)
        torch.testing.assert_close(split.logprobs, whole.logprobs, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(split.entropy, whole.entropy, atol=1e-6, rtol=1e-6)
        assert torch.equal(split.is_argmax, whole.is_argmax)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_of_two_ranks_keeps_at_most_six_tenths_of_a_row(ran: Path, name: str) -> None:
    _, whole = torch.load(ran / f"{name}-1-0", weights_only=False)
    for rank in range(2):
        _, kept = torch.load(ran / f"{name}-2-{rank}", weights_only=False)
        assert kept <= 0.6 * whole


@pytest.mark.parametrize("name", TREES)
def test_ranks_that_share_tokens_share_prefixes_of_rows(ran: Path, name: str) -> None:
    outputs, gradients = torch.load(ran / f"tree-{name}-1-0")
    for num_ranks, rank in [(2, 0), (2, 1), (4, 3)]:
        own, summed = torch.load(ran / f"tree-{name}-{num_ranks}-{rank}")
        for found, expected in zip(own, outputs, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(summed[parameter], gradient, atol=1e-5, rtol=1e-5, msg=parameter)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_ranks_encode_each_image_once_and_have_the_gradients_of_one(ran: Path, is_frozen: bool) -> None:
    whole, expected = torch.load(ran / f"images-{is_frozen}-1-0")
    assert any("visual" in name for name in expected) is not is_frozen
    for num_ranks in (2, 4):
        seen = [torch.load(ran / f"images-{is_frozen}-{num_ranks}-{rank}") for rank in range(num_ranks)]
        assert sum(num_patches for num_patches, _ in seen) == whole
        assert all(0 < num_patches < whole for num_patches, _ in seen)
        for name, gradient in expected.items():
            torch.testing.assert_close(seen[0][1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)
