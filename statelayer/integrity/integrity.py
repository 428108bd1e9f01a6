"""The entrance to ``verify`` and ``replay``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelayer import paths
from statelayer.integrity.replay import Replay
from statelayer.integrity.scans import Scans
from statelayer.integrity.verify import Verification

if TYPE_CHECKING:
    from statelayer.clock import Clock
    from statelayer.drivers import Database
    from statelayer.integrity.report import ReplayReport, VerifyReport
    from statelayer.settings import Settings


class Integrity:
    """Proves and restores the agreement of entries and log. Both work while others write."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock

    async def verify(self, namespace: str) -> VerifyReport:
        """Look for contradictions in a namespace, and change nothing.

        The log is checked up to where it ends now, each entry against the log of the instant that it is read at.
        """
        checked = paths.parse_namespace(namespace, self._settings.roots)
        return await Verification(self._scans(checked), checked).run()

    async def replay(self, namespace: str) -> ReplayReport:
        """Make every entry of a namespace what its events say. Calls no executor; a second run writes nothing.

        Raises ``IntegrityError`` for a newest event that was broken by hand, ``ContentionError`` when writers never
        let it repair an entry that claims too much, ``OutcomeUnknownError`` when such a repair's commit was lost.
        Running it again is always safe.
        """
        checked = paths.parse_namespace(namespace, self._settings.roots)
        scans = self._scans(checked)
        return await Replay(self._database, self._settings, self._clock, scans, checked).run()

    def _scans(self, namespace: str) -> Scans:
        return Scans(self._database, self._settings, namespace)
