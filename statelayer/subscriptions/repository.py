"""Subscriptions in the database: publishing, enabling, disabling, and the revision that orders all of it.

Every change increments ``meta.subscriptions.revision`` in its transaction, which also makes publishers take turns, and
every append stamps the revision that its own transaction read. A subscription is in force for an event when one of its
``activeRevs`` holds that stamp: for every append that began after ``publish`` returned, for none that began before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from bson.int64 import Int64

from statelayer import mongo_indexes as names
from statelayer.events import check_id
from statelayer.errors import InvalidSubscriptionError, NotFoundError, SetupRequiredError
from statelayer.paths import parse
from statelayer.subscriptions.catalogue import Catalogue
from statelayer.subscriptions.models import StoredSubscription, Subscription
from statelayer.transactions import Deadline, retried

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document, Session
    from statelayer.settings import Settings

log = structlog.get_logger("statelayer.subscriptions")

T = TypeVar("T")


class Subscriptions:
    """The subscriptions of one database. ``target_of`` says what a registered action runs, which is frozen here."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        clock: Clock,
        target_of: Callable[[Subscription], str] = lambda subscription: subscription.default_target,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._target_of = target_of
        self._documents = database.collection(names.SUBSCRIPTIONS)
        self._meta = database.collection(names.META)
        self._catalogue: Catalogue | None = None

    # --- changing

    async def publish(self, subscription: Subscription | Mapping[str, Any]) -> StoredSubscription:
        """Publish a definition, in force for every append that begins after this returns.

        A new definition under a known name becomes its next version and disables the one before. Publishing what the
        newest version already says changes nothing, not even whether it is enabled, so that a service may publish at
        each start. Raises ``InvalidSubscriptionError`` naming every clause that is wrong.
        """
        definition = Subscription.parse(subscription, roots=self._settings.roots)
        target = self._target_of(definition)

        async def body(session: Session) -> StoredSubscription:
            newest = await self._newest(definition.name, session)
            if newest is not None and newest.same_definition(definition) and newest.target == target:
                return newest
            revision = await self._next_revision(session)
            if newest is not None and newest.enabled:
                await self._replace(newest.disabled_from(revision), session)
            published = StoredSubscription.first_in_force(
                definition,
                version=newest.version + 1 if newest else 1,
                revision=revision,
                target=target,
                published_at=self._clock.now(),
            )
            await self._documents.insert_one(_stored(published), session=session)
            return published

        published = await self._change(body)
        log.info("subscription_published", name=published.name, version=published.version)
        return published

    async def enable(self, name: str) -> StoredSubscription:
        """Put the newest version of a subscription in force again, from now on."""

        async def body(session: Session) -> StoredSubscription:
            newest = await self._known(name, session)
            if newest.enabled and newest.active_revs[-1:] and newest.active_revs[-1][1] is None:
                return newest
            return await self._replace(newest.enabled_from(await self._next_revision(session)), session)

        return await self._change(body)

    async def disable(self, name: str) -> StoredSubscription:
        """Put a subscription out of force for every append that begins after this returns."""

        async def body(session: Session) -> StoredSubscription:
            newest = await self._known(name, session)
            if not newest.enabled and all(end is not None for _, end in newest.active_revs):
                return newest
            return await self._replace(newest.disabled_from(await self._next_revision(session)), session)

        return await self._change(body)

    # --- reading

    async def get(self, name: str, version: int | None = None) -> StoredSubscription | None:
        """Return one version of a subscription, by default the newest; ``None`` when there is none."""
        named = {"name": check_id("subscription", name)}
        wanted = named if version is None else {**named, "version": version}
        document = await self._documents.find_one(wanted, sort=[("version", -1)])
        return None if document is None else StoredSubscription.from_document(document)

    async def find(self, *, enabled: bool | None = None) -> list[StoredSubscription]:
        """Return all versions of all subscriptions by name and version; with ``enabled``, only those that are (not)."""
        wanted = {} if enabled is None else {"enabled": enabled}
        documents = await self._documents.find(wanted, sort=[("name", 1), ("version", 1)])
        return Catalogue(documents, revision=0).subscriptions

    async def refresh(self) -> Catalogue:
        """Read all subscriptions into memory, as of a revision that is at least the one of this moment."""
        revision = await self.revision()
        documents = await self._documents.find({}, sort=[("name", 1), ("version", 1)])
        self._catalogue = Catalogue(documents, revision=revision)
        return self._catalogue

    def match(self, path: str) -> list[StoredSubscription]:
        """Return the enabled subscriptions whose pattern matches this path, as of the last ``refresh``. No I/O."""
        if self._catalogue is None:
            raise NotFoundError("catalogue", "of subscriptions", "Call `await layer.subscriptions.refresh()` first.")
        segments = parse(path, self._settings.roots).segments
        return [found for found in self._catalogue.candidates(segments) if found.enabled]

    async def revision(self) -> int:
        """Return the revision that appends are stamped with now."""
        document = await self._meta.find_one({"_id": "subscriptions"})
        if document is None:
            raise SetupRequiredError(self._database.name)
        return int(document["revision"])

    # --- what was toggled by hand

    async def settle_toggles(self, catalogue: Catalogue) -> bool:
        """Perform ``enabled`` flags that somebody set by hand, in force from now on; say whether there were any."""
        toggled = [found for found in catalogue.subscriptions if found.enabled != _is_open(found)]
        for found in toggled:
            log.warning("subscription_toggled_by_hand", name=found.name, version=found.version, enabled=found.enabled)
            await self._settle(found.name, found.version)
        return bool(toggled)

    async def _settle(self, name: str, version: int) -> None:
        async def body(session: Session) -> StoredSubscription | None:
            document = await self._documents.find_one({"name": name, "version": version}, session=session)
            try:
                found = StoredSubscription.from_document(document or {})
            except InvalidSubscriptionError:
                return None
            if found.enabled == _is_open(found):
                return found
            revision = await self._next_revision(session)
            changed = found.enabled_from(revision) if found.enabled else found.disabled_from(revision)
            return await self._replace(changed, session)

        await self._change(body)

    # --- inside a transaction

    async def _change(self, body: Callable[[Session], Awaitable[T]]) -> T:
        deadline = Deadline(self._clock, self._settings.append_timeout)
        return await retried(
            self._database, body, deadline=deadline, what="The change of subscriptions", repeatable=True
        )

    async def _next_revision(self, session: Session) -> int:
        changed = await self._meta.find_one_and_update(
            {"_id": "subscriptions"}, {"$inc": {"revision": Int64(1)}}, session=session
        )
        if changed is None:
            raise SetupRequiredError(self._database.name)
        return int(changed["revision"])

    async def _newest(self, name: str, session: Session) -> StoredSubscription | None:
        document = await self._documents.find_one({"name": name}, sort=[("version", -1)], session=session)
        return None if document is None else StoredSubscription.from_document(document)

    async def _known(self, name: str, session: Session) -> StoredSubscription:
        newest = await self._newest(check_id("subscription", name), session)
        if newest is None:
            raise NotFoundError("subscription", name, "Publish it first.")
        return newest

    async def _replace(self, subscription: StoredSubscription, session: Session) -> StoredSubscription:
        await self._documents.replace_one({"_id": subscription.id}, _stored(subscription), session=session)
        return subscription


def _is_open(subscription: StoredSubscription) -> bool:
    return any(end is None for _, end in subscription.active_revs)


def _stored(subscription: StoredSubscription) -> Document:
    return subscription.to_document()
