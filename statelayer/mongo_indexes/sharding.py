"""The script that spreads the state layer over a sharded cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from statelayer.errors import InvalidSettingsError
from statelayer.mongo_indexes.collections import COLLECTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = """\
// Shards the collections of the state layer that grow with use by namespace.
// Run it once, in mongosh on a mongos, after setup() and before the first zone holds data.
// The other collections are small and stay on the primary shard of the database.
const database = %(database)s;

// The field that holds the namespace.
const collections = %(collections)s;

// Each zone is one shard and holds the namespaces from the end of the zone before it up to, not including, `until`.
// The ranges are the same for all collections: equal shard keys alone do not put one namespace's documents on one
// shard, and an append whose documents lie on several pays for a commit across them.
const zones = %(zones)s;

for (const { zone, shard } of zones) {
  sh.addShardToZone(shard, zone);
}
for (const { name, key } of collections) {
  const collection = `${database}.${name}`;
  let from = MinKey();
  for (const { zone, until } of zones) {
    const to = until === null ? MaxKey() : until;
    sh.updateZoneKeyRange(collection, { [key]: from }, { [key]: to }, zone);
    from = to;
  }
  sh.shardCollection(collection, { [key]: 1 });
}
"""


@dataclass(frozen=True, slots=True)
class Zone:
    """The namespaces that one shard holds: from the end of the zone before it up to, not including, ``until``.

    The last zone ends with None. Text is ordered by code points: ``/tasks/M`` comes after ``/tasks/L9``, and before
    ``/tasks/a``.
    """

    shard: str
    until: str | None = None


def sharding_script(database_name: str, prefix: str = "", zones: Sequence[Zone] = ()) -> str:
    """Return the mongosh script that shards the collections which grow with use, in identical zones.

    Without zones it only names the shard keys; then the balancer may put one namespace's events and entries on
    different shards. Raises ``InvalidSettingsError`` if the zones do not follow each other up to the end.
    """
    _check(zones)
    collections = [{"name": prefix + spec.name, "key": spec.shard_key} for spec in COLLECTIONS if spec.grows]
    named_zones = [{"zone": f"statelayer-{zone.shard}", **asdict(zone)} for zone in zones]
    return SCRIPT % {
        "database": json.dumps(database_name),
        "collections": json.dumps(collections, indent=2),
        "zones": json.dumps(named_zones, indent=2),
    }


def _check(zones: Sequence[Zone]) -> None:
    if not zones:
        return
    ends = [zone.until for zone in zones[:-1]]
    texts = [end for end in ends if end is not None]
    ascending = texts == sorted(set(texts)) and len(texts) == len(ends)
    if zones[-1].until is not None or not ascending:
        raise InvalidSettingsError("Zones follow each other in ascending order of `until`; only the last one has none.")
