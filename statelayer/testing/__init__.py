"""For the tests of services that embed the library: fixtures (see ``plugin``) and ``wait_until``."""

from statelayer.testing.waiting import wait_until

__all__ = ["wait_until"]
