"""One rollout actor as the driver sees it."""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.rollout.messages import GroupRequest
from actors.rollout.prompt_client import PromptClient
from cluster.records.partial_response import TokenChunk
from cluster.records.trajectory import Generated, Prompt
from cluster.roles import EngineLoad, SamplingSettings
from cluster.rollout.in_flight import InFlightRequests
from cluster.runtime.concurrency import Patience
from cluster.runtime.ray_actors import answer, stop
from cluster.weight_sync.manifest import Manifest
from cluster.weight_sync.transport import Rendezvous


class RolloutClient:
    """Typed calls to one `RolloutActor`, each with a deadline; also a weight-sync `Receiver`."""

    def __init__(
        self,
        handle: Any,
        name: str,
        *,
        in_flight_requests: InFlightRequests,
        start_s: float,
        rollout_s: float,
        sync_s: float,
        sign_s: float,
        probe_s: float,
        stop_s: float,
    ) -> None:
        """`handle` is the Ray handle of a `RolloutActor`; what it streams goes to `in_flight_requests`.

        `rollout_s` bounds the wait for a group, or for its next chunk.
        """
        self.name = name
        self._handle = handle
        self._in_flight_requests = in_flight_requests
        self._prompts = PromptClient(handle, name)
        self._version = -1  # the newest that it is known to serve
        self._held: list[Patience] = []  # of prompts that wait in the actor for the end of a push
        self._start_s = start_s
        self._rollout_s = rollout_s
        self._sync_s = sync_s
        self._sign_s = sign_s
        self._probe_s = probe_s
        self._stop_s = stop_s

    async def start(self) -> None:
        await answer(self._handle.start.remote(), timeout_s=self._start_s, what=f"{self.name} to load its engine")

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """A reference to the group, which the caller owns and which outlives the actor, and its report.

        The actor continues from the chunks that the in-flight request of the prompt holds, and adds new ones to it. A
        prompt that needs the weights of a push has its time from the end of that push.
        """
        in_flight, patience = self._in_flight_requests.of(prompt, settings), self._patience(settings.min_version)

        def take(chunk: TokenChunk) -> None:
            in_flight.add(chunk)
            patience.renew()

        with self._prompts.asked(GroupRequest(prompt, settings, in_flight.next_attempt()), take) as answered:
            what = f"{self.name} to generate prompt {prompt.prompt_id}"
            group, report = await patience.wait_for(answered, what)
        return Generated.of(prompt, group, report)

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return await self._sync(self._handle.prompt_logprobs.remote(prompt), "score the probe prompt")

    async def check_manifest(self, manifest: Manifest) -> None:
        await self._sync(self._handle.check_manifest.remote(manifest), "check the manifest")

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        await self._sync(self._handle.join_transfer.remote(rendezvous, rank), "join the transfer group")

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        call = self._handle.receive_weights.remote(manifest, bucket_bytes, version)
        try:
            self._version = await self._sync(call, f"receive version {version}")
        finally:
            self._end_holds()
        return self._version

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Any, version: int) -> None:
        call = self._handle.load_weights.remote(manifest, bucket_bytes, buckets, version)
        await self._sync(call, f"load version {version}")
        self._version = version

    async def is_alive(self) -> None:
        """Return while the process is alive, however busy it is."""
        what = f"{self.name} to answer that it is alive"
        await answer(self._handle.is_alive.remote(), timeout_s=self._sign_s, what=what)

    async def probe(self) -> None:
        """Sample one token with the engine itself."""
        what = f"{self.name} to sample one token"
        await answer(self._handle.probe.remote(), timeout_s=self._probe_s, what=what)

    async def sleep(self) -> None:
        await self._sync(self._handle.sleep.remote(), "go to sleep")

    async def wake_up(self, tag: str) -> None:
        await self._sync(self._handle.wake_up.remote(tag), f"wake up ({tag})")

    async def load(self) -> EngineLoad:
        """How loaded the engine is, as of its newest step."""
        what = f"{self.name} to say how loaded it is"
        return await answer(self._handle.load.remote(self.name), timeout_s=self._sign_s, what=what)

    async def close(self) -> None:
        """End the process, whatever state it is in."""
        self._prompts.close()
        await stop(self._handle, timeout_s=self._stop_s, what=self.name)

    async def weight_version(self) -> int:
        self._version = await self._sync(self._handle.ping.remote(), "name its weight version")
        return self._version

    def _patience(self, min_version: int) -> Patience:
        is_held = min_version > self._version
        patience = Patience(self._rollout_s, is_held=is_held)
        if is_held:
            self._held.append(patience)
        return patience

    def _end_holds(self) -> None:
        """A push has ended, however it did: what waited for it is as far as it will get."""
        for patience in self._held:
            patience.renew()
        self._held.clear()

    async def _sync(self, reference: Any, what: str) -> Any:
        return await answer(reference, timeout_s=self._sync_s, what=f"{self.name} to {what}")
