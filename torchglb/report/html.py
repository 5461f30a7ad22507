"""One self-contained HTML file about a record: figures, tables, configuration."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from torchglb.report.summary import Bound, Cell, Share, Summary, summarise
from torchglb.report.tables import number, p_value, title_of
from torchglb.simulate import Record

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 1180px; margin: 2rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.setting, figcaption, .note { color: #555; } figure { margin: 1.2rem 0; }
img { max-width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: .28rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1.5px solid #333; } tbody tr:nth-child(even) { background: #f6f6f6; }
.best { font-weight: 700; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
"""

PROMISE = "With probability 1 - delta the regret is at most this, and nothing unknown enters."
NO_PROMISE = "These rewards follow no known GLM: it is what the run believed, and no promise."

CAPTIONS = {
    "regret": "Regret, mean and one standard deviation over the replicates; the leading policies"
    " magnified; where d = 2, the confidence sets of the first replicate at the final round.",
    "certificate": "What each run certified about its own regret, beside the regret it had.",
    "time": "Time of one round of the whole batch.",
}


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
        >>> write_report(Record.open("results/figure1"), "report.html")  # doctest: +SKIP
    """
    summary = summarise(record, reference)
    config = record.config
    parts = [
        f"<h1>{escape(title_of(record))}</h1>",
        f'<p class="setting">{escape(_setting(record, summary))}</p>',
        *_figures(record),
        *_regret(summary),
        *_comparison(summary),
        *_sets(summary, config["delta"]),
        *_certificates(summary),
        *_times(summary),
        "<h2>Configuration</h2>",
        _listing(config),
        "<h2>Manifest</h2>",
        _listing(record.manifest),
    ]
    head = f'<meta charset="utf-8"><title>{escape(str(config["name"]))}</title>'
    page = f"<!doctype html>\n<html lang='en'><head>{head}<style>{STYLE}</style></head><body>\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page + "\n".join(parts) + "\n</body></html>\n", encoding="utf-8")
    return path


def _setting(record: Record, summary: Summary) -> str:
    config = record.config
    arms = f", K = {config['arms']}" if config.get("arms") else ""
    dim = f", d = {config['dim']}" if config.get("dim") else ""
    return (
        f"{config['name']}: {_family(config['family'])} rewards,"
        f" {config['environment']} arms{arms}{dim},"
        f" {summary.rounds} rounds, {summary.replicates} replicates for each S,"
        f" delta = {config['delta']:g}, seed {config['seed']}. All policies and replicates meet the"
        " same arms and the same random numbers, so replicates are compared in pairs."
    )


def _family(family: object) -> str:
    if isinstance(family, dict):
        options = ", ".join(f"{key} = {family[key]}" for key in family if key != "name")
        return f"{family['name']} ({options})" if options else str(family["name"])
    return str(family)


def _figures(record: Record) -> list[str]:
    try:
        from torchglb.plotting import figures  # here, so that tables need no matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return ['<p class="note">No figures: matplotlib (the extra "plot") is not installed.</p>']
    parts = []
    for name, figure in figures(record).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        caption = escape(CAPTIONS[name])
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return parts


# ---- tables ----------------------------------------------------------------------------------


def _regret(summary: Summary) -> list[str]:
    def cell(label: str, S: float) -> str:
        shown = number(summary.cells[label, S].regret)
        least = min(summary.cells[other, S].regret.mean for other in summary.labels)
        best = summary.cells[label, S].regret.mean == least
        return f'<span class="best">{shown}</span>' if best else shown

    order = []
    for S in summary.S:
        ranked = sorted(summary.labels, key=lambda k: summary.cells[k, S].regret.mean)
        order.append(f"<li>S = {S:g}: {escape(' < '.join(ranked))}</li>")
    return [
        "<h2>Final regret</h2>",
        f'<p class="note">Mean ± standard error at t = {summary.rounds}; smallest in bold.</p>',
        _by_radius(summary, cell),
        "<p>In the order of their means:</p>",
        f"<ul>{''.join(order)}</ul>",
    ]


def _comparison(summary: Summary) -> list[str]:
    if len(summary.labels) == 1:
        return []
    rows = []
    for label in summary.labels:
        for S in summary.S:
            versus = summary.cells[label, S].versus
            if versus is None:
                continue
            counts = f"{versus.wins} / {versus.losses}"
            tests = [p_value(versus.t_test), p_value(versus.sign_test)]
            rows.append([escape(label), f"{S:g}", number(versus.difference), counts, *tests])
    reference = escape(summary.reference)
    heads = ["policy", "S", f"regret minus that of {reference}", "smaller / larger"]
    return [
        f"<h2>Paired comparison with {reference}</h2>",
        '<p class="note">Replicate by replicate, on common random numbers; two-sided p-values, not'
        " corrected for the number of comparisons.</p>",
        _table([*heads, "t-test p", "sign test p"], rows),
    ]


def _sets(summary: Summary, delta: float) -> list[str]:
    parts = []
    if any(cell.area is not None for cell in summary.cells.values()):
        parts += [
            "<h2>Areas of the final confidence sets</h2>",
            _by_radius(summary, lambda k, S: number(summary.cells[k, S].area), _has("area")),
        ]
    if any(cell.missed is not None for cell in summary.cells.values()):
        parts += [
            "<h2>Coverage</h2>",
            '<p class="note">Replicates in which theta* was outside its set at any recorded'
            f" round, with the exact 95% interval of the probability; promised: at most {delta:g}."
            "</p>",
            _by_radius(summary, lambda k, S: _share(summary.cells[k, S].missed), _has("missed")),
        ]
    return parts


def _share(share: Share | None) -> str:
    if share is None:
        return "-"
    low, high = share.interval
    return f"{share.hits}/{share.trials} [{low:.3f}, {high:.3f}]"


def _certificates(summary: Summary) -> list[str]:
    parts = []
    if any(cell.certificate is not None for cell in summary.cells.values()):
        parts += [
            "<h2>Realised certificate</h2>",
            f'<p class="note">The sum of the widths of the intervals of the arms that were played.'
            f" {PROMISE if summary.model else NO_PROMISE}</p>",
            _by_radius(
                summary, lambda k, S: number(summary.cells[k, S].certificate), _has("certificate")
            ),
        ]
    if summary.bound:
        rows = [
            [f"{S:g}", f"{kappa:.4g}", *_bound(summary.bound[S])]
            for S, kappa in zip(summary.S, summary.kappa, strict=True)
            if S in summary.bound
        ]
        parts += [
            "<h2>The regret bound of the theory</h2>",
            '<p class="note">Theorem 4.1 with every constant, for OFUGLB with the radius of'
            " Theorem 3.1, at this horizon and for any arm set.</p>",
            _table(["S", "kappa", "bound", ""], rows),
        ]
    return parts


def _bound(bound: Bound) -> list[str]:
    remark = "vacuous: no more than the largest regret there is" if bound.vacuous else "informative"
    return [f"{bound.value:.4g}", remark]


def _times(summary: Summary) -> list[str]:
    rows = []
    for label in summary.labels:
        timing = summary.timing[label]
        passes = [summary.cells[label, S].passes for S in summary.S]
        known = [value for value in passes if value is not None]
        cells = [f"{value:.3g}" for value in (timing.mean, timing.early, timing.late)]
        growth = f"{timing.late / timing.early:.2f}" if timing.early > 0 else "-"
        share = f"{sum(known) / len(known):.3g}" if known else "-"
        rows.append([escape(label), *cells, growth, f"{timing.total:.1f}", share])
    runs = len(summary.S) * summary.replicates
    heads = ["policy", "ms per round", "first tenth", "last tenth", "ratio", "seconds in all"]
    return [
        "<h2>Time</h2>",
        f'<p class="note">One round of the whole batch of {runs} runs; medians of the first and the'
        " last tenth of the rounds. Passes: over the history, per round and run.</p>",
        _table([*heads, "passes per round"], rows),
    ]


def _has(attribute: str) -> Callable[[Cell], bool]:
    return lambda cell: getattr(cell, attribute) is not None


def _by_radius(
    summary: Summary,
    cell: Callable[[str, float], str],
    keep: Callable[[Cell], bool] = lambda cell: True,
) -> str:
    """A row for each policy, a column for each S."""
    rows = [
        [escape(label), *(cell(label, S) for S in summary.S)]
        for label in summary.labels
        if any(keep(summary.cells[label, S]) for S in summary.S)
    ]
    return _table(["policy", *(f"S = {S:g}" for S in summary.S)], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _listing(value: object) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"
