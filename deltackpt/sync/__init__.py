"""Steps moved between places: `mirror` copies a repository to another store, `follow` keeps a cache at its head.

Under both: `transfer` (one object, verified while it streams, resumed), `backoff` (which errors are waited out),
`poller` (what it costs to see whether a branch moved). `mirror_plan` says what would be copied before it is, `scan` and
`repair` find and replace damaged objects of a copy, `prefetch` fetches the next step while the last one is in use.
"""
