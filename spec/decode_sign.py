"""The signatures of SIGNATURES.md, made from that text and RFC 8032 alone: ed25519 in plain integers, slow and small.

python spec/decode_sign.py REPO NAME KEY...     which record NAME (refs/main, tags/best) is at, by these public keys
"""

import hashlib
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for whoever loads this file by its path
from decode_base import Refused, need

P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
ROOT = pow(2, (P - 1) // 4, P)
STATEMENT = {"format", "version", "repository", "ref", "step", "id", "previous", "time"}
KEYS = {"format", "version", "repository", "number", "keys", "threshold", "expires"}


# ------------------------------------------------------------------------------------------ ed25519


def add(a, b):  # on extended coordinates: X, Y, Z, T with x = X/Z, y = Y/Z, x y = T/Z
    e, f = (a[1] - a[0]) * (b[1] - b[0]) % P, (a[1] + a[0]) * (b[1] + b[0]) % P
    g, h = 2 * a[3] * b[3] * D % P, 2 * a[2] * b[2] % P
    i, j, k, m = f - e, h - g, h + g, f + e
    return i * j % P, k * m % P, j * k % P, i * m % P


def times(number, point):
    total = (0, 1, 1, 0)
    while number:
        if number & 1:
            total = add(total, point)
        point, number = add(point, point), number >> 1
    return total


def point_of(data):
    """The point that 32 bytes stand for, or None."""
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (1 << 255) - 1
    if y >= P:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * ROOT % P
    if (x * x - square) % P or (x == 0 and sign):
        return None
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


BASE = point_of((4 * pow(5, -1, P) % P).to_bytes(32, "little"))


def verifies(key, signature, message):
    """RFC 8032, 5.1.7."""
    a, r, s = point_of(key), point_of(signature[:32]), int.from_bytes(signature[32:], "little")
    if a is None or r is None or s >= L:
        return False
    h = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % L
    left, right = times(s, BASE), add(r, times(h, a))
    return not (left[0] * right[2] - right[0] * left[2]) % P and not (left[1] * right[2] - right[1] * left[2]) % P


# ---------------------------------------------------------------------------------------------- records


def canonical(value):
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def signed(by, value):
    """[S-SIG-3]"""
    parts = (b"deltackpt", b"", b"sha512", hashlib.sha512(canonical(value)).digest())
    message = b"SSHSIG" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return verifies(bytes.fromhex(by["key"]), bytes.fromhex(by["signature"]), message)


def is_hex(value, digits):
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def is_number(value, most):
    return type(value) is int and 0 <= value <= most


def is_link(value):
    fields = isinstance(value, dict) and value.keys() == {"step", "id"}
    return fields and is_number(value["step"], 10**15) and is_hex(value["id"], 64)


def is_by(value):
    return isinstance(value, dict) and is_hex(value.get("key"), 64) and is_hex(value.get("signature"), 128)


def load(data, limit, fields):
    need(len(data) <= limit, "json-too-long")
    try:
        value = json.loads(data)
    except ValueError:
        raise Refused("json-syntax", "no JSON") from None
    need(isinstance(value, dict) and value.keys() == fields, "signature-field")
    need(canonical(value) == data, "manifest-canonical")
    return value


def parse_signature(data):
    """[S-SIG-1]"""
    value = load(data, 4096, {"statement", "key", "signature"})
    said = value["statement"]
    need(isinstance(said, dict) and said.get("format") == "deltackpt-statement", "signature-field")
    need(type(said.get("version")) is int and said["version"] == 1, "version-unknown")
    need(is_by(value) and said.keys() == STATEMENT and is_hex(said["repository"], 32), "signature-field")
    named = said["ref"] is None or isinstance(said["ref"], str)
    pattern = "(refs|tags)/[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
    need(named and (said["ref"] is None or re.fullmatch(pattern, said["ref"])), "signature-field")
    need(is_link({"step": said["step"], "id": said["id"]}) and is_number(said["time"], 1 << 53), "signature-field")
    need(said["previous"] is None or is_link(said["previous"]), "signature-field")
    return value


def parse_keys(data):
    """[S-SIG-17]"""
    value = load(data, 65536, {"keys", "signatures"})
    keys, by = value["keys"], value["signatures"]
    need(isinstance(keys, dict) and keys.get("format") == "deltackpt-keys", "signature-field")
    need(type(keys.get("version")) is int and keys["version"] == 1, "version-unknown")
    need(keys.keys() == KEYS and isinstance(keys["keys"], list) and 0 < len(keys["keys"]) <= 32, "signature-field")
    need(all(is_hex(key, 64) for key in keys["keys"]) and keys["keys"] == sorted({*keys["keys"]}), "signature-field")
    need(is_number(keys["threshold"], len(keys["keys"])) and keys["threshold"], "signature-field")
    need(is_number(keys["number"], 10**15) and is_hex(keys["repository"], 32), "signature-field")
    need(keys["expires"] is None or is_number(keys["expires"], 1 << 53), "signature-field")
    need(isinstance(by, list) and len(by) <= 32 and all(map(is_by, by)), "signature-field")
    return value


# ---------------------------------------------------------------------------------------------- reading


def newest_keys(root, repository, trust, now):
    """The key set that counts, from the one that a reader was given: {"number", "keys", "threshold"} ([S-SIG-10])."""
    current = {"number": 0, "threshold": 1, "expires": None, **trust}
    while (path := Path(root) / f"keys/{current['number'] + 1:08d}.json").is_file():
        value = parse_keys(path.read_bytes())
        new = value["keys"]
        need((new["repository"], new["number"]) == (repository, current["number"] + 1), "keys-wrong")
        good = {by["key"] for by in value["signatures"] if signed(by, new)}
        for keys in (current, new):
            need(len(good & {*keys["keys"]}) >= keys["threshold"], "keys-wrong")
        current = new
    need(current["expires"] is None or now <= current["expires"], "keys-expired")  # [S-SIG-11]
    return current


def statements(root, repository, link, keys, name):
    """{key: its statements about a record and a name, or under any where name is None}; all proven."""
    found = {}
    folder = Path(root) / f"signatures/{link['step']:08d}-{link['id']}"
    for path in sorted(folder.glob("*.json")):
        try:
            value = parse_signature(path.read_bytes())
        except Refused:  # [S-SIG-4]
            continue
        said = value["statement"]
        right = (said["repository"], said["step"], said["id"]) == (repository, link["step"], link["id"])
        right = right and path.name == f"{value['key'][:16]}-{said['time']:016d}.json" and name in (None, said["ref"])
        if right and value["key"] in keys and signed(value, said):
            found.setdefault(value["key"], []).append(said)
    return found


def read_name(root, name, trust, seen=None, now=0, max_age=None):
    """What a branch or tag is at, for a reader with these keys, who has ``seen`` this statement of it before."""
    repository = json.loads((Path(root) / "deltackpt.json").read_bytes())["repository"]
    need(trust.get("repository") in (None, repository), "repository-replaced")  # [S-SIG-13]
    link = json.loads((Path(root) / f"{name}.json").read_bytes())
    keys = newest_keys(root, repository, {k: v for k, v in trust.items() if k != "repository"}, now)
    found = statements(root, repository, link, keys["keys"], name)
    need(len(found) >= keys["threshold"], "signature-missing")  # [S-SIG-5]
    times = sorted((max(said["time"] for said in of_key) for of_key in found.values()), reverse=True)
    time = times[keys["threshold"] - 1]
    if seen is not None and (seen["step"], seen["id"]) != (link["step"], link["id"]):
        need(time > seen["time"], "signature-replayed")  # [S-SIG-6]
        if name.startswith("refs/"):
            need(came_from(root, repository, link, keys, name, seen), "rewind-unsigned")
    if max_age is not None and name.startswith("refs/"):
        need(abs(now - time / 1e6) <= max_age, "signature-stale")  # [S-SIG-7]
    return link


def read_record(root, link, trust, now=0):
    """A record that was asked for by step and id."""
    repository = json.loads((Path(root) / "deltackpt.json").read_bytes())["repository"]
    keys = newest_keys(root, repository, {k: v for k, v in trust.items() if k != "repository"}, now)
    need(len(statements(root, repository, link, keys["keys"], None)) >= keys["threshold"], "signature-missing")
    return link


def came_from(root, repository, link, keys, name, seen):
    """[S-SIG-9]"""
    at = link
    while at is not None and at["id"] != seen["id"] and at["step"] > seen["step"]:
        if (manifest := manifest_of(root, at)) is None:
            return True
        at = manifest["parent"]
    if at is not None and at["id"] == seen["id"]:
        return True
    at = link
    while at is not None and (manifest := manifest_of(root, at)) is not None:
        by_key = statements(root, repository, at, keys["keys"], name).values()
        later = [[said for said in found if said["time"] > seen["time"]] for found in by_key]
        if sum(any(said["previous"] != manifest["parent"] for said in found) for found in later) >= keys["threshold"]:
            return True
        at = manifest["parent"] if any(later) else None
    return False


def manifest_of(root, link):
    path = Path(root) / f"steps/{link['step']:08d}-{link['id']}.json"
    if not path.is_file():
        return None
    data = path.read_bytes()
    need(hashlib.sha256(data).hexdigest() == link["id"], "manifest-hash")
    return json.loads(data)


if __name__ == "__main__":
    print(read_name(sys.argv[1], sys.argv[2], {"keys": sys.argv[3:]}))
