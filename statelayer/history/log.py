"""The log of one namespace, page by page.

Each page is a read of its own that begins behind the last seq: no cursor stays open while a slow consumer works, so
that none can be lost, and a page is one reply of the server, which bounds it in bytes (16 MiB) as well as in events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from statelayer import mongo_indexes as names
from statelayer.errors import IntegrityError
from statelayer.events import Entry, Event

if TYPE_CHECKING:
    from statelayer.drivers import Database, Document
    from statelayer.settings import Settings


class Log:
    """Reads the events of a namespace in the order of their seqs."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._page_size = settings.page_size
        self._events = database.collection(names.EVENTS)

    async def head(self, namespace: str) -> int:
        """Return the seq of the newest event, 0 when there is none."""
        newest = await self._events.find_one(
            {"namespace": namespace, "seq": {"$gte": 1}}, sort=[("seq", -1)], projection={"seq": 1}
        )
        return int(newest["seq"]) if newest else 0

    async def page(self, namespace: str, after: int) -> list[Document]:
        """Return the next events behind this seq; none when the log ends there."""
        wanted = {"namespace": namespace, "seq": {"$gt": after}}
        return await self._events.find_page(wanted, sort=[("seq", 1)], size=self._page_size)


def event_of(document: Document) -> Event:
    """Read a document of ``events``, or raise ``IntegrityError`` when it was broken by hand."""
    try:
        return Event.from_document(document)
    except ValidationError as error:
        raise _broken("event", document, error) from error


def entry_of(document: Document) -> Entry:
    """Read a document of ``entries``, or raise ``IntegrityError`` when it was broken by hand."""
    try:
        return Entry.from_document(document)
    except ValidationError as error:
        raise _broken("entry", document, error) from error


def _broken(kind: str, document: Document, error: ValidationError) -> IntegrityError:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    namespace: Any = document.get("namespace")
    return IntegrityError(
        f"The {kind} {document['_id']} of {namespace} (seq {document.get('seq')!r}) cannot be read: {field}: "
        f"{first['msg']}. Run `verify` on its namespace.",
        namespace=str(namespace),
        path=document["_id"] if kind == "entry" else document.get("path"),
    )
