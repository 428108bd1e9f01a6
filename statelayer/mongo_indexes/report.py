"""What a setup did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SetupReport:
    """What ``setup`` did, in sentences. ``created`` and ``repaired`` are empty when everything was as it must be."""

    created: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
