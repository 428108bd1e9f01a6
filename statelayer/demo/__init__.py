"""The demo: import declarations in, HS headings out, by subscriptions alone."""
