"""One run of the demo: requests are written, subscriptions do the rest, and what they did is read from the log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from statelayer.clock import Clock
from statelayer.demo.intake import Intake
from statelayer.demo.lanes import in_lanes
from statelayer.demo.progress import Silence
from statelayer.demo.report import Report, Tree, Verified
from statelayer.demo.requests import read_file
from statelayer.demo.service import SUBSCRIPTIONS, register
from statelayer.demo.settling import Settling
from statelayer.demo.traces import chain_of, fact_of, stages_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statelayer import StateLayer
    from statelayer.demo.progress import Progress
    from statelayer.demo.report import Chain, Classified, Refused
    from statelayer.demo.requests import BrokenLine, Request
    from statelayer.events import Event
    from statelayer.integrity import VerifyReport
    from statelayer.integrity.report import Problem

SHIPPED = Path(__file__).with_name("requests.jsonl")

PATIENCE = 60.0


class UnreadableInputError(Exception):
    """The file of requests cannot be read."""


class Session:
    """A customs desk on a layer, which it teaches the demo's executors.

    ``patience`` is in seconds; when nothing at all has ended for so long, the rest is reported as unfinished.
    """

    def __init__(self, layer: StateLayer, *, progress: Progress | None = None, patience: float = PATIENCE) -> None:
        self._layer = layer
        self._progress = progress or Silence()
        self._patience = patience
        self._clock = Clock()
        register(layer)

    async def run(self, source: Path = SHIPPED) -> Report:
        """Write the file's requests, wait until it is quiet, and say what happened.

        Only what this run wrote counts, and what came of it; the log may hold more. Raises ``UnreadableInputError``
        and the errors of the library.
        """
        began = self._clock.monotonic()
        await self._prepare()
        async with self._layer.running():
            intake = await self._take_in(source)
            settling = await self._settle(intake)
        return await self._report(source, intake, settling, began)

    async def _prepare(self) -> None:
        with self._progress.phase("Preparing the database"):
            await self._layer.setup()
            for subscription in SUBSCRIPTIONS:
                await self._layer.subscriptions.publish(subscription)

    async def _take_in(self, source: Path) -> Intake:
        intake = Intake(self._layer)
        with self._progress.phase("Writing requests", _count_lines(source)) as advance:
            await in_lanes(_lines(source), intake.take, done=advance)
        with self._progress.phase("Submitting tasks", len(intake.tasks)) as advance:
            await in_lanes(intake.tasks.values(), intake.submit, done=advance)
        return intake

    async def _settle(self, intake: Intake) -> Settling:
        with self._progress.phase("Waiting for what they woke", len(intake.roots)) as advance:
            settling = Settling(self._layer, intake, patience=self._patience, written_settled=advance)
            await in_lanes(intake.tasks.values(), settling.follow)
        return settling

    async def _verify(self, intake: Intake) -> list[Verified]:
        verified: list[Verified] = []

        async def verify(namespace: str) -> None:
            verified.append(_verified(await self._layer.verify(namespace)))

        with self._progress.phase("Verifying", len(intake.tasks)) as advance:
            await in_lanes(intake.tasks, verify, done=advance)
        return sorted(verified, key=lambda report: report.namespace)

    async def _report(self, source: Path, intake: Intake, settling: Settling, began: float) -> Report:
        tally = settling.tally
        classified = sorted(tally.classified, key=_path)
        refused = sorted(tally.refused, key=_path)
        submissions = [task.submission for task in intake.tasks.values() if task.submission is not None]
        return Report(
            source=str(source),
            tasks=len(intake.tasks),
            requests=intake.requests,
            drafts=sorted(tally.drafts, key=lambda goods: goods.path),
            broken=sorted(intake.broken, key=lambda line: line.number),
            rejected=intake.rejected,
            woken=tally.woken,
            classified=classified,
            refused=refused,
            failed=tally.failed,
            unfinished=settling.unfinished,
            chain=await self._chain(submissions[:1]),
            trees=await self._trees(classified[:1], refused[:1], submissions[:1]),
            verified=await self._verify(intake),
            events=tally.events,
            seconds=round(self._clock.monotonic() - began, 3),
        )

    async def _chain(self, submissions: Sequence[Event]) -> Chain | None:
        for submission in submissions:
            stages = stages_of(await self._layer.trace_causation(event_id=submission.id))
            find = self._layer.executions.find
            return chain_of(stages, [e for stage in stages for e in await find(event_id=stage.id, state="skipped")])
        return None

    async def _trees(
        self, classified: Sequence[Classified], refused: Sequence[Refused], submissions: Sequence[Event]
    ) -> list[Tree]:
        examples = [("classified", found.goods.event_id) for found in classified]
        examples += [("refused", found.goods.event_id) for found in refused]
        examples += [("chain", event.id) for event in submissions]
        return [await self._tree(kind, event_id) for kind, event_id in examples]

    async def _tree(self, kind: str, event_id: str) -> Tree:
        tree = await self._layer.trace_causation(event_id=event_id)
        return Tree(kind, fact_of(tree.roots[0]))


def _lines(source: Path) -> Iterator[Request | BrokenLine]:
    try:
        yield from read_file(source)
    except OSError as error:
        raise UnreadableInputError(f"{source} cannot be read: {error.strerror or error}.") from error


def _count_lines(source: Path) -> int | None:
    """Count ahead, for the progress; what is no regular file can be read only once."""
    try:
        if not source.is_file():
            return None
        with source.open("rb") as lines:
            return sum(not line.isspace() for line in lines)
    except OSError:
        return None


def _path(found: Classified | Refused) -> str:
    return found.goods.path


def _verified(report: VerifyReport) -> Verified:
    problems = [_told(problem) for problem in report.problems]
    return Verified(report.namespace, report.ok, report.events, report.entries, problems)


def _told(problem: Problem) -> str:
    place = " ".join(str(part) for part in (problem.path, problem.seq and f"seq {problem.seq}") if part)
    return f"{problem.kind}: {place} is {problem.actual!r:.80}, and should be {problem.expected!r:.80}"
