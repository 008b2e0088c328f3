"""Every rule whose breach has an error code is cited where the library checks it, and shown by a test or a vector."""

import re

from support.spec_text import ROWS, RULE, TEXTS
from support.store_rules import SHOWN_BY
from support.vectors import INDEX, ROOT

CITED = re.compile(r"\[([FS]-[A-Z]+-\d+)\]")
CODES = {code for code, *_ in ROWS}
RULES = {rule: text for spec in TEXTS for rule, text in RULE.findall(spec)}

# Rules of codecs and patch whose checks cite none so far. The list only gets shorter.
NOT_YET = {"F-PLAIN-2", "F-PLANE-1", "F-PLANE-5", "F-STEP-3", "F-STEP-4", "F-STEP-5", "F-TAB-14"}


def with_a_code():
    """Rules that a vector of the format breaks and gets a code for, those of STORE's table, and those that name one."""
    found = {rule for vector in INDEX if "error" in vector for rule in vector["rules"]}
    found |= {"S-REF-1", "S-MARK-1"}  # the rows of STORE's table that name no rule
    return found | {rule for rule, text in RULES.items() if CODES & set(re.findall(r"`([a-z0-9-]+)`", text))}


def in_code():
    return {rule for path in (ROOT / "deltackpt").rglob("*.py") for rule in CITED.findall(path.read_text())}


def test_every_rule_with_a_code_is_cited_at_its_check():
    assert with_a_code() - in_code() <= NOT_YET


def test_every_rule_with_a_code_has_a_test_or_a_vector():
    shown = {rule for vector in INDEX for rule in vector["rules"]} | SHOWN_BY.keys()
    assert with_a_code() <= shown


def test_what_is_cited_is_a_rule():
    assert in_code() <= RULES.keys()


def test_the_list_names_rules_with_a_code():
    assert with_a_code() >= NOT_YET
