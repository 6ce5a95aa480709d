"""The report's first screen: a few sentences, made from the numbers, on what agrees with the paper and what does not.

A claim counts once, however many protocols have it: as tested at the paper's length, else as far as it has runs.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from flatmin_lab.recipes.protocols import PROTOCOLS
from flatmin_lab.report.columns import column_named
from flatmin_lab.report.figures.style import NAMES
from flatmin_lab.report.html import as_printed, format_p, joined, mean_and_std, whole
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.paper.claims import FAILS, HOLDS, MEASURES, NO_DATA, POINTS_THAT_WAY, UNDECIDED, ClaimVerdict
from flatmin_lab.report.paper.evidence import Evidence, ProtocolEvidence
from flatmin_lab.report.paper.families import split_name
from flatmin_lab.report.paper.frontier import Mode

LISTED = 2  # claims or rows that a sentence names; the rest is counted
COMPARED_TABLES = ("table1", "table2", "table3")  # whose numbers the paper prints with a standard deviation


class KeyResult(NamedTuple):
    topic: str
    sentence: str


def key_results(found: Evidence) -> list[KeyResult]:
    """A sentence on each topic that has runs; none where there are only synthetic images, which are no evidence."""
    judged = [protocol for protocol in found.protocols if protocol.name != "smoke"]
    if not judged:
        return []
    full = [protocol for protocol in judged if protocol.has_paper_length]
    claims = _one_each(full or judged)
    return [
        KeyResult("Agrees with the paper", _agrees(claims, full)),
        KeyResult("Compared with the paper's numbers", _beside(full)),
        KeyResult("Contradicted or undecided", _differs(claims, full)),
        KeyResult("With shorter runs", _shorter([protocol for protocol in judged if protocol not in full])),
        *(KeyResult("At lower cost", sentence) for sentence in _cheaper(judged)),
        KeyResult("Missing", _missing(claims, found)),
    ]


def _one_each(protocols: Sequence[ProtocolEvidence]) -> list[ClaimVerdict]:
    """The paper's claims, each with its strongest verdict: tested, else a direction, else none."""
    tested, too_few, waiting = zip(*((part.tested, part.too_few, part.waiting) for part in protocols), strict=True)
    chosen: dict[str, ClaimVerdict] = {}
    for claim in chain.from_iterable((*tested, *too_few, *waiting)):
        chosen.setdefault(claim.says, claim)
    return [claim for claim in chosen.values() if not claim.ours]


def _tested(claims: Iterable[ClaimVerdict]) -> list[ClaimVerdict]:
    return [claim for claim in claims if claim.p is not None]


def _agrees(claims: Sequence[ClaimVerdict], full: Sequence[ProtocolEvidence]) -> str:
    tested = _tested(claims) if full else []
    epochs = PROTOCOLS["paper"].epochs
    if not tested:
        return f"At the paper's length of {epochs} epochs, nothing can be tested yet: a test needs three runs per side."
    holding = [claim for claim in tested if claim.verdict == HOLDS]
    head = f"At the paper's length of {epochs} epochs, {_share(len(holding), len(tested))} claims that can be tested"
    return f"{head} hold{': ' if holding else ''}{_listed(_merged(holding))}."


def _beside(full: Sequence[ProtocolEvidence]) -> str:
    yes, single, apart = 0, 0, dict[str, list[str]]()
    for protocol in full:
        for table in (table for table in protocol.tables if table.experiment.name in COMPARED_TABLES):
            for row in table.rows:
                for cell, column in zip(row.cells, table.columns, strict=True):
                    if cell.agrees is None or cell.paper is None:
                        continue
                    if not cell.agrees:
                        who = f"{NAMES[row.recipe.method]} on {TITLES.get(row.data, row.data)} under “{protocol.name}”"
                        theirs = as_printed(cell.paper, column.digits)
                        numbers = f"{column.label}: {mean_and_std(cell.values, column.digits)}, the paper {theirs}"
                        apart.setdefault(who, []).append(numbers)
                    elif len(cell.values) > 1:
                        yes += 1
                    else:
                        single += 1
    no = sum(map(len, apart.values()))
    if not yes + single + no:
        return "None of our means can be compared with the paper's yet."
    words = f"Of {yes + single + no} comparisons with the paper's means, {yes} agree"
    words += f", {single} {'are' if single != 1 else 'is'} not contradicted by our single run" if single else ""
    rows = [f"{who} ({_listed(numbers)})" for who, numbers in apart.items()]
    return f"{words}, and {no} do{'es' if no == 1 else ''} not agree{': ' if no else ''}{_listed(rows)}."


def _differs(claims: Sequence[ClaimVerdict], full: Sequence[ProtocolEvidence]) -> str:
    tested = _tested(claims) if full else []
    failing = [claim for claim in tested if claim.verdict == FAILS]
    undecided = [claim for claim in tested if claim.verdict == UNDECIDED]
    if not tested:
        return "No claim has been tested at the paper's length, so none is contradicted either."
    words = f"Contradicted: {_listed(_merged(failing))}" if failing else "No tested claim is contradicted"
    return f"{words}; no significant difference: {_listed(_merged(undecided))}." if undecided else f"{words}."


def _shorter(protocols: Sequence[ProtocolEvidence]) -> str:
    sentences = []
    for protocol in protocols:
        tested = _tested(_one_each([protocol]))
        if not tested:
            continue
        kinds = {HOLDS: "hold", UNDECIDED: "no significant difference", FAILS: "contradicted"}
        by_kind = {kind: [claim for claim in tested if claim.verdict == kind] for kind in kinds}
        epochs = next(length.epochs for name, length in PROTOCOLS.items() if name == protocol.name)
        words = f"With {epochs} epochs (“{protocol.name}”), {_share(len(by_kind[HOLDS]), len(tested))} tested claims"
        lists = [
            f"{word}: {_listed(_merged(by_kind[kind], with_numbers=False))}"
            for kind, word in kinds.items()
            if by_kind[kind]
        ]
        sentences.append(f"{words} {'; '.join(lists)}." if by_kind[HOLDS] else f"{words} hold; {'; '.join(lists)}.")
    return " ".join(sentences) or "No claim has been tested with shorter runs."


def _cheaper(protocols: Sequence[ProtocolEvidence]) -> list[str]:
    """Sentences about all data sets with a mode that keeps AMP's gain for less, or gains more; none without any."""
    keeping, better = [], []
    for protocol in protocols:
        for one in protocol.frontiers:
            where = f"on {TITLES[one.data]} (“{protocol.name}”)"
            if mode := one.cheapest:
                shares = [f"{whole(100 * kept.share)} %" if kept else "none" for kept in mode.kept]
                kept = "keeps {1} of AMP's gain in NLL, {2} in ECE and {0} in error".format(*shares)
                keeping.append(f"{mode.row.name} {where} {kept}, at {_cost(mode)}")
            if mode := one.better:
                better.append(f"{mode.row.name} {where}, at {_cost(mode)}")
    parts = []
    if keeping:
        parts.append(
            f"{'; '.join(keeping)}; no error is significantly higher than with AMP in all steps (uncorrected tests)."
        )
    if better:
        head = (
            "Significantly lower than with AMP in all steps, in each of the three after Holm's correction for the modes"
        )
        parts.append(f"{head}: {'; '.join(better)}.")
    return [" ".join(parts)] if parts else []


def _cost(mode: Mode) -> str:
    if mode.measured[0] is None:
        return f"{mode.cost:.2f} times ERM's passes"
    return f"{mode.measured[0]:.2f} times ERM's time"


def _missing(claims: Sequence[ClaimVerdict], found: Evidence) -> str:
    few = [claim for claim in claims if claim.too_few]
    none = [claim for claim in claims if claim.verdict == NO_DATA]
    parts = []
    if found.missing:
        wanted = found.planned - len(found.withdrawn)
        parts.append(f"{len(found.missing)} of {wanted} planned training runs are not done")
    if few:
        towards = sum(claim.verdict == POINTS_THAT_WAY for claim in few)
        parts.append(
            f"{len(few)} of the paper's {len(claims)} claims have too few runs for a test (fewer than three per side); "
            f"{towards} of them point the paper's way"
        )
    if none:
        where = _without_any(claims)
        parts.append(f"{len(none)} claims have no runs yet{f', including all {where}' if where else ''}")
    return f"{'; '.join(parts)}." if parts else "Nothing: every claim of the paper has been tested."


def _without_any(claims: Sequence[ClaimVerdict]) -> str:
    """The data sets and networks of which no claim has runs."""
    known: dict[str, list[bool]] = {}
    for verdict in claims:
        if verdict.claim is not None:
            data, model = split_name(verdict.claim.lower)[0].rpartition("/")[2].split("-")
            for name, word in ((data, "on"), (model, "with")):
                known.setdefault(f"{word} {TITLES.get(name, name)}", []).append(verdict.verdict == NO_DATA)
    return joined([name for name, lacking in known.items() if all(lacking)])


def _merged(claims: Sequence[ClaimVerdict], *, with_numbers: bool = True) -> list[str]:
    """One line for all measures in which two methods were compared, with the numbers of the first."""
    groups: dict[object, list[ClaimVerdict]] = {}
    for verdict in claims:
        claim = verdict.claim
        pair = (claim.lower, claim.higher) if claim is not None and claim.measure in MEASURES else verdict.says
        groups.setdefault(pair, []).append(verdict)
    return [_line(group, with_numbers) for group in groups.values()]


def _line(group: Sequence[ClaimVerdict], with_numbers: bool) -> str:
    first, claim = group[0], group[0].claim
    words, label = first.says, ""
    if claim is not None:
        label = f"{column_named(claim.measure).label}: "
        if claim.measure in MEASURES:
            measures = [MEASURES[verdict.claim.measure] for verdict in group if verdict.claim is not None]
            words = words.replace(MEASURES[claim.measure], joined(measures), 1)
    if not with_numbers:
        return words
    p = f", p\u00a0{format_p(first.p)}" if first.verdict == UNDECIDED and first.p is not None else ""
    return f"{words} ({label}{first.numbers}{p})"


def _listed(lines: Sequence[str]) -> str:
    more = [f"{len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "; ".join([*lines[:LISTED], *more])


def _share(part: int, whole: int) -> str:
    return f"all {whole}" if part == whole else f"{part or 'none'} of {whole}"
