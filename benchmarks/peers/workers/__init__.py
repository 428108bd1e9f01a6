"""How each peer appends and reads, as its documents advise. Run by ``benchmarks.peers.run`` where it is installed."""
