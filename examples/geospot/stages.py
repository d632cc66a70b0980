"""The five stages of the geospot curriculum: weights of the fields and widths of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIELDS = ("country", "region", "city", "coords")
TAUS_KM: Mapping[str, float] = {"country": 2000.0, "region": 500.0, "city": 100.0, "coords": 25.0}
FULL = "full"


@dataclass(frozen=True)
class GeographyStage:
    """Index of the stage's first prompt, weights of country, region and city, and factor of the kernel widths."""

    first_prompt: int
    country: float
    region: float
    city: float
    width: float  # times TAUS_KM

    @property
    def weights(self) -> dict[str, float]:
        """Field -> weight above 0; the weight of coordinates is the city's, or half the region's if larger."""
        named = {"country": self.country, "region": self.region, "city": self.city}
        return {field: w for field, w in {**named, "coords": max(self.city, 0.5 * self.region)}.items() if w > 0}


STAGES: Mapping[str, GeographyStage] = {
    "country_coarse": GeographyStage(0, 1.0, 0.0, 0.0, 4.0),
    "country": GeographyStage(100, 0.5, 0.0, 0.0, 2.0),
    "region": GeographyStage(300, 0.3, 0.4, 0.0, 2.0),
    "city": GeographyStage(600, 0.2, 0.3, 0.3, 1.5),
    FULL: GeographyStage(1000, 0.15, 0.25, 0.4, 1.0),
}
