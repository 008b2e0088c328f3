"""Steps on their way between places: `mirror` takes a repository to another store, `follow` keeps a cache at its head.

Under both: `transfer` (one object, verified while it streams, resumed), `outage` (what is waited out), `polling` (what
a look costs). `mirror_plan` says what would move before it does, `prefetch` fetches ahead of a switch.
"""
