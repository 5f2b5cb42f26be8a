"""The subcommand `doctor`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosytriton_ensemble.cli import Command

if TYPE_CHECKING:
    from cosytriton_ensemble.advice import Advice
    from cosytriton_ensemble.doctor import Finding
    from cosytriton_ensemble.facts import Facts

WIDTH = 110  # characters of a line of the table


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", type=Path, help="also check every artifact of this repository")
    parser.add_argument("--json", action="store_true", help="facts, findings and advice as JSON")


def _run(args: argparse.Namespace) -> int:
    from cosytriton_ensemble.advice import recommend
    from cosytriton_ensemble.doctor import examine, examine_repository
    from cosytriton_ensemble.facts import Facts

    facts = Facts.here()
    findings = examine(facts)
    if args.repository is not None:
        findings += examine_repository(args.repository, facts.machine)
    advice = recommend(facts)
    sys.stdout.write(as_json(facts, findings, advice) if args.json else as_table(findings, advice))
    return int(any(finding.state == "broken" for finding in findings))


def as_table(findings: Sequence[Finding], advice: Advice) -> str:
    """For people: a line for each finding, what mends it below, the advice at the end."""
    width = max(len(finding.subject) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines += _wrapped(f"{finding.state:<6}  {finding.subject:<{width}}  ", finding.sentence)
        if finding.mend:
            # Never wrapped: it is to be copied.
            lines.append(f"{'':<{width + 8}}  -> {finding.mend}")
    name = advice.profile.name if advice.profile else "none"
    lines += ["", *_wrapped(f"{'':<6}  {'profile':<{width}}  ", f"{name}. {advice.reason}")]
    if advice.profile:
        lines.append(f"{'':<6}  {'threads':<{width}}  {advice.threads} for each graph (`serve --threads`)")
    return "\n".join(lines) + "\n"


def _wrapped(head: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, max(WIDTH - len(head), 40), break_long_words=False, break_on_hyphens=False)
    for line in lines:
        yield head + line
        head = " " * len(head)


def as_json(facts: Facts, findings: Sequence[Finding], advice: Advice) -> str:
    """For programs: `facts`, `findings` and `advice`, whose profile may be null."""
    name = advice.profile.name if advice.profile else None
    whole = {
        "facts": asdict(facts),
        "findings": [asdict(finding) for finding in findings],
        "advice": {"profile": name, "reason": advice.reason, "threads": advice.threads},
    }
    return json.dumps(whole, indent=2, default=_sorted) + "\n"


def _sorted(values: Any) -> list[Any]:
    """Sets, which JSON lacks."""
    return sorted(values)


DOCTOR = Command("find out what this machine lacks, and which profile it should serve", _arguments, _run)
