"""Observed: the measurements that the simulated workers of a rehearsal share."""

from __future__ import annotations

from mobula.deploy.rehearsal.simulated.cpu import CpuMeter
from mobula.deploy.rehearsal.simulated.decoder import Decoder
from mobula.deploy.rehearsal.simulated.store import StoreLedger


class Observed:
    """Object stores, decoders and the CPU time of the simulation."""

    def __init__(self, driver_node: str) -> None:
        self.driver_node = driver_node
        self.cpu = CpuMeter()
        self.store = StoreLedger()
        self._decoders: list[Decoder] = []  # also of lost engines

    def add(self, decoder: Decoder) -> None:
        self._decoders.append(decoder)

    def busy_s(self) -> float:
        """Seconds in which engines decode, summed over engines."""
        for decoder in self._decoders:
            decoder.settle()
        return sum(decoder.busy_s for decoder in self._decoders)

    def num_tokens(self) -> int:
        return sum(decoder.num_tokens for decoder in self._decoders)
