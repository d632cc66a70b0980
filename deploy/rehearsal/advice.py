"""The end of `mobula plan`: the preset to take, the time of a step, and how the run is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from mobula.cluster.errors import MobulaError
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode
from mobula.deploy.planning.plan_command import Setting, changed, fits_with, on_preset, presets, words
from mobula.deploy.rehearsal.speeds import estimated_speeds, gpu_of_memory
from mobula.deploy.rehearsal.stage import shrunk, step_time
from mobula.learner.policies.shapes import AnyShape, ImageShape

SPREAD = 2  # between the estimate from peak rates and a real step


def show_advice(
    config: RunConfig, given: Sequence[str], shape: AnyShape, nodes: Sequence[PlannedNode], console: Console
) -> None:
    """Prints the fastest of the presets that fit, by an estimate on GPUs, and the commands that start the run."""
    settings: dict[str, Setting] = {config.resources.preset: {}}
    settings |= {name: on_preset(config, name, len(nodes)) for name in presets(config, len(nodes))}
    fitting = {name: setting for name, setting in settings.items() if fits_with(config, shape, nodes, setting)}
    times = dict(_times(config, fitting, shape, nodes))
    best = min(times, key=lambda name: times[name], default=config.resources.preset)
    if times:
        gpu = gpu_of_memory(nodes[0].gpu_bytes or 0)
        others = ", ".join(
            f"{name} {time:.0f} s" for name, time in sorted(times.items(), key=lambda x: x[1]) if name != best
        )
        console.print(
            f"recommended: resources={best}, about {times[best]:.0f} s a step ({times[best] / SPREAD:.0f} to "
            f"{times[best] * SPREAD:.0f} s: from peak rates of {gpu}, nothing was measured)"
            + (f"; others that fit: {others}" if others else "")
        )
    else:
        reason = (
            "for models that make images" if isinstance(shape, ImageShape) else "on CPU: `mobula rehearse RUN` does"
        )
        console.print(f"the time of a step is not estimated {reason}")
    run = [word for word in given if word.partition("=")[0] not in ("resources", "resources.num_nodes")]
    chosen = " ".join([*run, words(fitting.get(best) or {"resources": best})])
    console.print(f"start it:         mobula train {chosen}")
    console.print(
        f"on a Ray cluster: ray job submit --address http://HEAD:8265 --working-dir . -- mobula train {chosen}"
    )


def _times(
    config: RunConfig, settings: Mapping[str, Setting], shape: AnyShape, nodes: Sequence[PlannedNode]
) -> Iterator[tuple[str, float]]:
    """Yields each preset with the seconds of a step by `estimated_speeds`."""
    if isinstance(shape, ImageShape) or config.resources.device != "cuda" or not nodes[0].gpu_bytes:
        return
    with TemporaryDirectory(prefix="mobula-plan-") as folder:
        small = shrunk(config, shape.model_type, Path(folder) / "model")
        for name, setting in settings.items():
            try:
                there = changed(small, setting)
                speeds = estimated_speeds(there, shape, gpu_of_memory(nodes[0].gpu_bytes))
                yield name, step_time(there, shape, nodes, speeds)
            except (MobulaError, ValueError):  # a combination that no run starts with
                continue
