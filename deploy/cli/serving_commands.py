"""Environments by themselves, and servers: play, rollout, serve-environment, serve-policy, serve-rewards and
serve-training."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mobula.cluster.errors import PreflightError
from mobula.deploy.cli.errors import explained
from mobula.deploy.cli.options import AllowHost, Host, Port, TokenEnv, TokenFile, address_of
from mobula.deploy.host.terminal import terminal

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Groups and keys in any order, as for train.")
]
SERVED = "sampler.adapters.max_served=16"  # if the user has set nothing


def announcing(name: str) -> Callable[[str], None]:
    console = terminal(soft_wrap=True)
    return lambda url: console.print(f"{name}: {url}")


def play(
    environment: Annotated[
        str, typer.Argument(metavar="ENV", help="An option of environment=, module:Class or FILE.py:Class.")
    ],
    overrides: Overrides = None,
    policy: Annotated[str | None, typer.Option(metavar="FOLDER", help="A checkpoint that may act as well.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first episode.")] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Let the policy play the episode to its end.")] = False,
) -> None:
    """Play an environment in the terminal; see its images and rewards as the policy does."""
    with explained("the game is over"):
        from mobula.deploy.serve import play as playing

        config = playing.play_config(environment, overrides or [], policy)
        playing.start(config, seed=seed, plays_itself=watch, has_policy=policy is not None, console=terminal())


def rollout(
    overrides: Overrides = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes, or answers of a task without environment.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Episodes at a time.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Short for sampler.temperature.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=1e-6, max=1, help="Sample among the likeliest tokens of this probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample among so many tokens; 0 for all.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Short for sampler.max_tokens, of one turn.")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for seed.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for transcripts.json and transcripts.html.")] = Path(
        "rollout"
    ),
) -> None:
    """Let policy.model play or answer held-out episodes, and write down turns, images and rewards."""
    from mobula.configs.load import load_config

    short = {"sampler.temperature": temperature, "sampler.max_tokens": max_new_tokens, "seed": seed}
    with explained("nothing is written"):
        shorthands = [f"{key}={value}" for key, value in short.items() if value is not None]
        config = load_config([*(overrides or []), *shorthands])
        from mobula.deploy.serve import rollout as rolling

        options = rolling.RolloutOptions(episodes, batch_size, top_p, top_k)
        raise typer.Exit(rolling.rollout(config, options, output, terminal(soft_wrap=True)))


def serve_environment(
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    idle: Annotated[float, typer.Option(min=1, help="Seconds after which a session without calls ends.")] = 600.0,
) -> None:
    """Serve the configured environment over HTTP until stopped, for runs with environment.host=remote."""
    from mobula.configs.load import load_config

    with explained("the server has stopped"):
        config = load_config(["data=environment", "rewards=environment", *(overrides or [])], is_complete=False)
        from mobula.deploy.serve import servers

        address = address_of(host, port, token_env, token_file, allow_host)
        servers.serve_environment(config.environment, address, idle, announcing("environment"))


def serve_policy(
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    capture: Annotated[Path | None, typer.Option(help="The folder for trajectories of sessions with a reward.")] = None,
    siblings: Annotated[int, typer.Option(min=1, help="Sessions of one task that make a group.")] = 8,
) -> None:
    """Serve policy.model to agent programs: OpenAI's chat completions with exact token ids and log-probs."""
    from mobula.configs.load import load_config

    with explained("the server has stopped"):
        config = load_config(["sampler=huggingface", *(overrides or [])], is_complete=False)
        from mobula.deploy.serve import policy as serving

        address = address_of(host, port, token_env, token_file, allow_host)
        serving.serve(config, address, capture, siblings, announcing("policy"))


def serve_rewards(
    rewards: Annotated[Path, typer.Argument(metavar="REWARDS.yaml", help="A file like a run's `rewards` section.")],
    host: Host = "127.0.0.1",
    port: Port = 0,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    threads: Annotated[int, typer.Option(min=1, help="Scoring threads; each loads all models.")] = 1,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; further ones get 503.")] = 64,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to read a request, and to score it.")] = 60.0,
    max_request_mb: Annotated[int, typer.Option(min=1, help="Largest request.")] = 64,
    device: Annotated[str, typer.Option(help="What models compute on: cpu, cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="What models compute in.")] = "float32",
) -> None:
    """Serve reward functions over HTTP until stopped."""
    with explained():
        from mobula.deploy.serve import servers

        announce = announcing("rewards")
        servers.serve_rewards(
            rewards,
            address_of(host, port, token_env, token_file, allow_host),
            lambda url: announce(f"{url} (description: {url}/docs)"),
            threads=threads,
            max_waiting=max_waiting,
            timeout_s=timeout,
            max_request_bytes=max_request_mb << 20,
            device=device,
            dtype=dtype,
        )


def serve_training(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Groups and keys, e.g. policy.model=FOLDER sampler=vllm"),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    allow_host: AllowHost = None,
    tenants: Annotated[
        Path | None, typer.Option(help="YAML file of `tenant: token` lines; without it every request is admitted.")
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Requests, snapshots and checkpoints. A restart with the same folder continues.")
    ] = Path("training_service"),
    model_name: Annotated[
        str | None, typer.Option(help="A further name of the base model for clients, e.g. its hub name.")
    ] = None,
) -> None:
    """Serve training and sampling of many LoRA adapters to programs that use the `tinker` client."""
    with explained("the server has stopped"):
        if find_spec("tinker") is None:
            raise PreflightError("the training service needs the package tinker: pip install 'mobula[tinker]'")
        from mobula.configs.load import load_config
        from mobula.configs.overrides import overridden
        from mobula.deploy.training_service import serving
        from mobula.deploy.training_service.tenants import read_tenants

        config = load_config(overrides or [], is_complete=False)
        if config.training_service.weights == "adapters":
            config = load_config(overridden([SERVED], overrides or []), is_complete=False)
        address = address_of(host, port, None, None, allow_host)
        serving.serve(config, address, read_tenants(tenants), folder, model_name, announcing("training service"))
