"""For the tests of services that embed the library: fixtures (see ``plugin``), ``wait_until``, a failing network."""

from statelayer.testing.proxy import Proxy
from statelayer.testing.waiting import wait_until

__all__ = ["Proxy", "wait_until"]
