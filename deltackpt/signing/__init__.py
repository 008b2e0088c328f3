"""Keys, who is trusted, and what was seen: ed25519 by `cryptography`, in OpenSSH's forms (spec/SIGNATURES.md)."""
