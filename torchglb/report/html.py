"""One self-contained HTML file about a record: figures, tables, configuration.

It needs no network, fits a narrow screen, and follows the reader's light or dark setting. The page
is a template (``report.html.jinja``) that escapes whatever is put into it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchglb.report.statistics import holm
from torchglb.report.summary import Bound, Cell, RunSummary, Share, boundary_warnings, summarise
from torchglb.report.tables import number, p_value, title_of
from torchglb.simulate import Record
from torchglb.simulate.files import write_bytes

PROMISE = "With probability 1 - delta the regret is at most this, and nothing unknown enters."
NO_PROMISE = "These rewards follow no known GLM: it is what the run believed, and no promise."

SHARED_ARMS = (
    "All replicates see one sequence of arms: standard errors and tests are about other rewards on"
    " these arms, not about other arms (torchglb run --arms-per-replicate draws them anew)."
)
OWN_ARMS = "Each replicate has arms of its own."

CAPTIONS = {
    "regret": "Regret, mean and one standard deviation over the replicates; the leading policies"
    " magnified; where d = 2, the confidence sets of the first replicate at the final round.",
    "certificate": "What each run certified about its own regret, beside the regret it had.",
    "time": "Time of one round of the whole batch.",
}


class Picture(NamedTuple):
    """A figure and what is seen in it."""

    caption: str
    data: str


class Best(str):
    """The text of a cell that is shown in bold."""

    __slots__ = ()


class Grid(NamedTuple):
    """Headings and rows of a table."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    """A table under its heading, with a note, and perhaps an order of the policies."""

    title: str
    table: Grid
    note: str = ""
    order: Sequence[str] = ()


def write_report(record: Record, path: Path | str, reference: str | None = None) -> Path:
    """Writes a report that needs nothing but this one file.

    Args:
        record: with at least one finished policy.
        path: of the HTML file; its directory is created if missing.
        reference: the label that the others are compared with, replicate by replicate;
            ``"ofuglb"`` if the record has it, else the first.

    Returns:
        The path.

    Example:
        >>> from torchglb.simulate import simulate
        >>> record = simulate(["random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> write_report(record, "report.html").name
        'report.html'
    """
    summary = summarise(record, reference)
    config = record.config
    page = rendered(
        name=config["name"],
        title=title_of(record),
        setting=_setting(record, summary),
        warnings=boundary_warnings(summary),
        pictures=_pictures(record),
        sections=[
            _regret(summary),
            *_comparison(summary),
            *_sets(summary, config["delta"]),
            *_certificates(summary),
            _times(summary),
        ],
        listings=[
            ("Configuration", _listing(config)),
            ("Manifest", _listing(record.manifest)),
        ],
    )
    path = Path(path)
    write_bytes(path, page.encode())
    return path


def rendered(
    *,
    name: str,
    title: str,
    setting: str,
    warnings: Sequence[str] = (),
    pictures: Sequence[Picture],
    sections: Sequence[Section],
    listings: Sequence[tuple[str, str]],
) -> str:
    """The page of these parts."""
    pages = Environment(
        loader=PackageLoader("torchglb.report", "."), autoescape=True, undefined=StrictUndefined
    )
    pages.tests["best"] = lambda cell: isinstance(cell, Best)
    return pages.get_template("report.html.jinja").render(
        name=name,
        title=title,
        setting=setting,
        warnings=warnings,
        pictures=pictures,
        sections=sections,
        listings=listings,
    )


def _setting(record: Record, summary: RunSummary) -> str:
    config = record.config
    arms = f", K = {config['arms']}" if config.get("arms") else ""
    dim = f", d = {config['dim']}" if config.get("dim") else ""
    return (
        f"{config['name']}: {_family(config['family'])} rewards,"
        f" {config['environment']} arms{arms}{dim},"
        f" {summary.rounds} rounds, {summary.replicates} replicates for each S,"
        f" delta = {config['delta']:g}, seed {config['seed']}. All policies meet the same arms"
        " and the same random numbers, so replicates are compared in pairs."
        f" {SHARED_ARMS if summary.shared_arms else OWN_ARMS}"
    )


def _family(family: object) -> str:
    if isinstance(family, dict):
        options = ", ".join(f"{key} = {family[key]}" for key in family if key != "name")
        return f"{family['name']} ({options})" if options else str(family["name"])
    return str(family)


def _pictures(record: Record) -> list[Picture]:
    try:
        from torchglb.plotting import figures  # here, so that tables need no matplotlib
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return []
    found = []
    for name, figure in figures(record).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        found.append(Picture(CAPTIONS[name], data))
    return found


# ---- tables ----------------------------------------------------------------------------------


def _regret(summary: RunSummary) -> Section:
    def cell(label: str, S: float) -> str:
        regret = summary.cells[label, S].regret
        least = min(summary.cells[other, S].regret.mean for other in summary.labels)
        return Best(number(regret)) if regret.mean == least else number(regret)

    order = []
    for S in summary.S:
        ranked = sorted(summary.labels, key=lambda k: summary.cells[k, S].regret.mean)
        order.append(f"S = {S:g}: {' < '.join(ranked)}")
    note = f"Mean ± standard error at t = {summary.rounds}; smallest in bold."
    return Section("Final regret", _by_radius(summary, cell), note, order)


def _comparison(summary: RunSummary) -> list[Section]:
    if len(summary.labels) == 1:
        return []
    found = [
        (label, S, versus)
        for label in summary.labels
        for S in summary.S
        if (versus := summary.cells[label, S].versus) is not None
    ]
    t_tests, sign_tests = (
        holm([getattr(versus, test) for _, _, versus in found]) for test in ("t_test", "sign_test")
    )
    rows = [
        [
            label,
            f"{S:g}",
            number(versus.difference),
            f"{versus.wins} / {versus.losses}",
            p_value(versus.t_test),
            p_value(t),
            p_value(versus.sign_test),
            p_value(sign),
        ]
        for (label, S, versus), t, sign in zip(found, t_tests, sign_tests, strict=True)
    ]
    heads = ["policy", "S", f"regret minus that of {summary.reference}", "smaller / larger"]
    tests = ["t-test p", "corrected", "sign test p", "corrected"]
    return [
        Section(
            f"Paired comparison with {summary.reference}",
            Grid([*heads, *tests], rows),
            "Replicate by replicate, on common random numbers; two-sided p-values. Corrected: by"
            f" Holm's method for the {len(rows)} comparisons of this table."
            f" {SHARED_ARMS if summary.shared_arms else ''}".rstrip(),
        )
    ]


def _sets(summary: RunSummary, delta: float) -> list[Section]:
    sections = []
    if any(cell.area is not None for cell in summary.cells.values()):
        areas = _by_radius(summary, lambda k, S: number(summary.cells[k, S].area), _has("area"))
        sections.append(Section("Areas of the final confidence sets", areas))
    if any(cell.missed is not None for cell in summary.cells.values()):
        note = (
            "Replicates in which theta* was outside its set at any recorded round, with the exact"
            f" 95% interval of the probability; promised: at most {delta:g}."
        )
        shares = _by_radius(
            summary, lambda k, S: _share(summary.cells[k, S].missed), _has("missed")
        )
        sections.append(Section("Coverage", shares, note))
    return sections


def _share(share: Share | None) -> str:
    if share is None:
        return "-"
    low, high = share.interval
    return f"{share.hits}/{share.trials} [{low:.3f}, {high:.3f}]"


def _certificates(summary: RunSummary) -> list[Section]:
    sections = []
    if any(cell.certificate is not None for cell in summary.cells.values()):
        note = (
            "Summed over the rounds: the largest upper end of all arms minus the lower end of the"
            f" arm that was played. {PROMISE if summary.model else NO_PROMISE}"
        )
        found = _by_radius(
            summary, lambda k, S: number(summary.cells[k, S].certificate), _has("certificate")
        )
        sections.append(Section("Realised certificate", found, note))
    if summary.bound:
        rows = [
            [f"{S:g}", f"{kappa:.4g}", *_bound(summary.bound[S])]
            for S, kappa in zip(summary.S, summary.kappa, strict=True)
            if S in summary.bound
        ]
        note = (
            "Theorem 4.1 with every constant, for OFUGLB with the radius of Theorem 3.1, at this"
            " horizon and for any arm set."
        )
        table = Grid(["S", "kappa", "bound", ""], rows)
        sections.append(Section("The regret bound of the theory", table, note))
    return sections


def _bound(bound: Bound) -> list[str]:
    remark = "vacuous: no more than the largest regret there is" if bound.vacuous else "informative"
    return [f"{bound.value:.4g}", remark]


def _times(summary: RunSummary) -> Section:
    rows = []
    for label in summary.labels:
        timing = summary.timing[label]
        passes = [summary.cells[label, S].passes for S in summary.S]
        known = [value for value in passes if value is not None]
        cells = [f"{value:.3g}" for value in (timing.mean, timing.early, timing.late)]
        growth = f"{timing.late / timing.early:.2f}" if timing.early > 0 else "-"
        share = f"{sum(known) / len(known):.3g}" if known else "-"
        rows.append([label, *cells, growth, f"{timing.total:.1f}", share])
    runs = len(summary.S) * summary.replicates
    heads = ["policy", "ms per round", "first tenth", "last tenth", "ratio", "seconds in all"]
    note = (
        f"One round of the whole batch of {runs} runs; medians of the first and the last tenth of"
        " the rounds. Passes: over the history, per round and run."
    )
    return Section("Time", Grid([*heads, "passes per round"], rows), note)


def _has(attribute: str) -> Callable[[Cell], bool]:
    return lambda cell: getattr(cell, attribute) is not None


def _by_radius(
    summary: RunSummary,
    cell: Callable[[str, float], str],
    keep: Callable[[Cell], bool] = lambda cell: True,
) -> Grid:
    """A row for each policy, a column for each S."""
    rows = [
        [label, *(cell(label, S) for S in summary.S)]
        for label in summary.labels
        if any(keep(summary.cells[label, S]) for S in summary.S)
    ]
    return Grid(["policy", *(f"S = {S:g}" for S in summary.S)], rows)


def _listing(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
