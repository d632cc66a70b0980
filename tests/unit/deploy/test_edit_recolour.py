"""Condition images of flow models: rows, prompts, replay, rewards that compare images, and the sheet."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flow_run import FlowRun
from PIL import Image, ImageDraw

from mobula.actors.datasets.rows import Row
from mobula.actors.processors.flow import FlowProcessor
from mobula.cluster.errors import MediaError, PromptError, RewardError
from mobula.cluster.records.trajectory import Response, Reward, ScoredGroup
from mobula.configs.load import ConfigError, load_config
from mobula.configs.schema import RunConfig
from mobula.examples.edit_recolour.edit_recolour import (
    COLOURS,
    letter_in_colour,
    letter_judge,
    rendered,
    write_edit_recolour,
)
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.family import IMAGES
from mobula.learner.policies.flow.policy import CONDITION, Denoising
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.rewards.contract import RewardRequest, evaluate
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

SMALL = (
    "learner=single", "resources.learner.num_workers=1", "algorithm.prompts_per_step=2",
    "algorithm.samples_per_prompt=12", "sampler.flow.num_steps=4", "sampler.flow.window_end=3",
)  # fmt: skip
edit_run = partial(FlowRun, writes=False)  # rows are there
TOOLS = Tools(IsolatedProcess(timeout_s=5, start_timeout_s=5), "cpu", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("edit")
    model = write_tiny_flow("flux-kontext-letters", found / "model")
    network = FlowCheckpoint(str(model)).transformer(torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():  # every layer matters
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08, generator=generator)
    network.save_pretrained(model / "transformer")
    write_edit_recolour(found / "data")
    return found


def config(folder: Path, *words: str) -> RunConfig:
    own = (f"policy.model={folder / 'model'}", f"data.path={folder / 'data'}", f"folder={folder / 'runs'}")
    return load_config(["experiment=edit_recolour", *own, *SMALL, *words])


def file(image: Image.Image) -> bytes:
    found = io.BytesIO()
    image.save(found, "PNG")
    return found.getvalue()


def test_a_condition_image_is_encoded_once_and_joins_the_text(folder: Path) -> None:
    run = edit_run(config(folder))
    rows = run.prepared.usable("train").rows
    first, again, other = (run.prepared.processor.prepare(rows[n], f"0/{n}/x") for n in (0, 0, 1))
    assert first.text == f"make it {rows[0].answer}"
    [handle] = first.media
    assert handle == again.media[0] and handle != other.media[0] and handle.modality == CONDITION
    medium = handle.reference
    assert medium.files == (rows[0].images[0].read_bytes(),), "rewards of this task read the condition image"
    assert Image.open(io.BytesIO(medium.thumbnail)).size == (12, 12)
    pixels = np.asarray(Image.open(rows[0].images[0])) / 127.5 - 1
    np.testing.assert_allclose(medium.inputs[IMAGES][0, 0].transpose(1, 2, 0), pixels, atol=1e-5)
    assert isinstance(run.prepared.processor, FlowProcessor)
    assert run.prepared.processor._encoded_images.cache_info().misses == 1, "two instructions share the image"


def test_images_of_other_modes_and_sizes_are_scaled(folder: Path, tmp_path: Path) -> None:
    processor = edit_run(config(folder)).prepared.processor
    for mode in ("RGBA", "LA", "P", "L", "1", "CMYK", "I;16"):
        white = Image.new("RGB", (40, 10), "white")
        image = {"RGBA": Image.new("RGBA", (40, 10), (255, 0, 0, 0)), "I;16": Image.new("I;16", (40, 10), 0xFFFF)}
        path = tmp_path / f"{mode}.{'tiff' if mode == 'CMYK' else 'png'}"
        (image.get(mode) or white.convert(mode)).save(path)
        prompt = processor.prepare(Row("a", "<image>make it red", "red", "", (path,)), "0/0/a")
        found = prompt.media[0].reference.inputs[IMAGES]
        assert found.shape == (1, 1, 3, 12, 12) and np.allclose(found, 1, atol=1e-5), "transparency is on white"


async def test_steps_after_an_image_are_replayed_and_depend_on_it(folder: Path) -> None:
    run = await edit_run(config(folder)).start()
    groups = await run.groups(run.prompts(2), 1)
    scored = [
        ScoredGroup(g.summary(), g, tuple(Reward(float(n)) for n, _ in enumerate(g.trajectories))) for g in groups
    ]
    assert run.learner.update(scored, 1).metrics["logprob_gap_max"] == 0
    await run.push()
    [prompt] = run.prompts(1)
    black = prompt.media[0].reference.inputs | {IMAGES: -np.ones((1, 1, 3, 12, 12), np.float32)}
    medium = replace(prompt.media[0].reference, inputs=black)
    blind = replace(prompt, media=(replace(prompt.media[0], key="black", reference=medium),))
    before, after = await run.actor.prompt_logprobs(prompt), await run.actor.prompt_logprobs(blind)
    np.testing.assert_array_equal(before, run.learner.sequence_logprobs(prompt))
    assert np.abs(before - after).max() > 1e-5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row("a", "make it red", "", ""), "has 0 images, and prompts of this run have sampler.flow.num_images=1"),
        (Row("b", "make it red", "", "", (Path("none.png"),)), "none.png is missing"),
        (Row("c", "<image>", "", "", (Path("letter.png"),)), "has no text"),
        (Row("d", "<image>red", "", "", (Path("letter.png"),), template="{}"), "takes one text and images"),
    ],
)
def test_rows_that_do_not_fit_are_refused(folder: Path, row: Row, message: str, monkeypatch: Any) -> None:
    processor = edit_run(config(folder)).prepared.processor
    monkeypatch.chdir(folder)
    rendered("A", 11.0, (0, 0), (255, 255, 255)).save("letter.png")
    with pytest.raises((PromptError, MediaError), match=message):
        processor.check(row)


@pytest.mark.parametrize(
    ("tiny", "words", "message"),
    [
        ("flux", {"num_images": 1}, "takes 0 to 0 condition images"),
        ("wan-i2v", {"num_frames": 5}, "takes 1 to 1 condition images"),
        ("flux-kontext", {"num_images": 1, "strength": 0.5, "window_start": 2}, "set sampler.flow.strength=1"),
        ("sd3", {"num_images": 1}, "set sampler.flow.strength to 0.75 or less"),
        ("sd3", {"num_images": 1, "strength": 0.9}, "set sampler.flow.strength to 0.75 or less"),
        ("sd3", {"num_images": 1, "strength": 0.6, "window_start": 1, "evaluation_steps": 2}, "to 0.5 or less"),
    ],
)
def test_models_that_do_not_fit_are_refused(tmp_path: Path, tiny: str, words: dict, message: str) -> None:
    checkpoint = FlowCheckpoint(str(write_tiny_flow(tiny, tmp_path / tiny)))
    how = Denoising(
        32, 32, 4, 1.0, "flow_grpo", 0.7, **{"window_start": 0, "window_end": 3, "dtype": "float32"} | words
    )
    with pytest.raises(ValueError, match=message):
        checkpoint.latent_shape(how)


def test_denoising_from_an_image_computes_a_share_of_the_steps(tmp_path: Path) -> None:
    family = FlowCheckpoint(str(write_tiny_flow("sd3", tmp_path / "sd3"))).family
    noise, image = torch.randn(2, 16, 4, 4), torch.randn(2, 1, 16, 4, 4)
    expected = 0.4 * noise + 0.6 * image[:, 0]
    torch.testing.assert_close(family.first_latents(noise, torch.tensor(0.4), {IMAGES: image}), expected)
    assert family.first_latents(noise, torch.tensor(1.0), {}) is noise
    how = Denoising(32, 32, 10, 1.0, "ddim", 0.7, 9, 10, "float32", num_images=1, strength=0.35)
    assert how.first_step == 6 and (how.proof.window_start, how.proof.window_end) == (6, 9)
    words = ["policy=tiny_sd3", "sampler=flow", "sampler.flow.strength=0.5", "algorithm.kl.coef=0"]
    with pytest.raises(ConfigError, match=r"set 5 <= window_start < window_end <= 10"):
        load_config([*words, "resources.reference.num_workers=0"], is_complete=False)


def edited(after: Image.Image, colour: str = "red", letter: str = "R", **metadata: Any) -> RewardRequest:
    before = rendered(letter, 12.0, (0, 0), (255, 255, 255))
    return RewardRequest(Response("", 1, False, (file(after),)), (colour, letter), metadata, "", (file(before),))


def test_rewards_compare_the_condition_image_with_the_result() -> None:
    right, wrong = (rendered("R", 12.0, (0, 0), COLOURS[colour]) for colour in ("red", "cyan"))
    kept = build_function("image_change", {"area": "dark", "wanted": "same", "full_at": 1.0}, TOOLS)
    assert letter_in_colour(edited(right)).value > 0.99 > 0.6 > letter_in_colour(edited(wrong)).value
    assert letter_in_colour(edited(Image.new("RGB", (12, 12)))).value == 0, "a black image has no colour"
    assert evaluate(kept, edited(right)).value > 0.9 > evaluate(kept, edited(Image.new("RGB", (12, 12), "white"))).value
    assert letter_judge(edited(right)).value == 1.0 and letter_judge(edited(wrong)).value == 0.5
    assert letter_judge(edited(rendered("W", 12.0, (0, 0), COLOURS["red"]))).value == 0.5
    box = build_function("image_change", {"area": "box", "wanted": "changed", "full_at": 0.5}, TOOLS)
    rest = build_function("image_change", {"area": "outside_box", "wanted": "same", "full_at": 0.5}, TOOLS)
    after = rendered("R", 12.0, (0, 0), (255, 255, 255))
    after.paste((255, 255, 255), (0, 0, 6, 6))
    for place, expected in (([0, 0, 0.5, 0.5], (True, 1.0)), ([0.5, 0.5, 1, 1], (False, None))):
        asked = edited(after, box=place)
        assert (evaluate(box, asked).value > 0.5) is expected[0]
        assert expected[1] is None or evaluate(rest, asked).value == expected[1]
    for asked, message in ((edited(after), "no box"), (replace(edited(after), prompt_images=()), "needs_images")):
        with pytest.raises(RewardError, match=message):
            evaluate(box, asked)


def test_shapes_are_counted_by_kind_and_colour() -> None:
    image = Image.new("RGB", (64, 64), "black")
    draw = ImageDraw.Draw(image)
    draw.ellipse((4, 4, 20, 20), fill="red")
    draw.ellipse((40, 4, 56, 20), fill="red")
    draw.rectangle((4, 40, 20, 56), fill="blue")
    draw.polygon([(40, 56), (58, 56), (49, 38)], fill=(0, 255, 0))
    wanted = [
        {"shape": "circle", "colour": "red", "count": 2},
        {"shape": "square", "colour": "blue", "count": 1},
        {"shape": "triangle", "colour": "green", "count": 1},
    ]
    strict, share = (build_function("shapes_check", {"strict": strict}, TOOLS) for strict in (True, False))
    assert evaluate(strict, edited(image, shapes=wanted)).value == 1
    assert evaluate(strict, edited(image, shapes=wanted[:2])).value == 0, "there is another object"
    assert evaluate(share, edited(image, shapes=wanted[:2])).value == 1
    fewer = [wanted[0] | {"count": 1}, wanted[1] | {"shape": "circle"}, wanted[2]]
    assert evaluate(share, edited(image, shapes=fewer)).value == pytest.approx(1 / 3)
    for shapes, message in ((None, "lists no `shapes`"), ([wanted[0] | {"colour": "pink"}], "write a shape")):
        with pytest.raises(RewardError, match=message):
            evaluate(strict, edited(image, shapes=shapes))
