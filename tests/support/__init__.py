"""What several tests use: kits that make states, chains and runs, stores that fail, and stand-ins for servers."""
