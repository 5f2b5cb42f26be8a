"""The results as pages: Markdown, and one HTML file with charts that fetches nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from cosytriton_bench.criteria import CRITERIA
from cosytriton_bench.gpu import expected
from cosytriton_bench.measure import Figure
from cosytriton_bench.results import Results, workload_of
from cosytriton_bench.stages import EAGER
from cosytriton_engines.report.charts import Bar, bars
from cosytriton_engines.report.markup import Markup, element, join, table

CHARTS = (  # case -> title
    ("lm_decode_b1", "One step of the language model, one request"),
    ("lm_decode_b8", "One step of the language model, eight requests"),
    ("lm_prefill", "Prompt of the language model"),
    ("flow", "Flow"),
    ("vocoder", "Vocoder"),
    ("unary", "A whole request through the server"),
    ("first_audio", "First audio of a stream"),
)
_MEANING = (  # begin of a case's name, what it is
    ("lm_prefill", "the language model on a prompt"),
    ("lm_decode_bN", "a step of it with N requests, the mean from the prompt to the last token"),
    ("lm_tokens_bN", "what such steps make"),
    ("lm_speech", "prompt, steps and sampling of one request"),
    ("flow, vocoder, ...", "a stage on the whole of one request"),
    ("..._short_bN", "a stage on N requests of 0.6 s as one batch"),
    ("encode_first, encode_again", "a reference is encoded; again, from the server's cache"),
    ("unary", "one request through client and server; the reference is encoded already"),
    ("rtf", "seconds of that for each second of speech"),
    ("stages_sum, overhead", "its stages alone, and what is added to them"),
    ("first_audio", "until the first chunk of a stream; `_loaded`: beside three long streams"),
    ("long_unary, long_stream", "four times as much speech, its tokens taken from a recording"),
    ("rate_N", "seconds of speech in a second while N requests are spoken"),
    ("ready", "from the command to the first spoken answer"),
    ("memory", "of all processes, shared pages counted once; of PyTorch, at the end"),
)
_KINDS = {EAGER: "fp16", "cpu": "fp32", "cpu_int8": "int8"}  # colours of the style sheet
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_TITLE = "Benchmark"
_ROOF = ("case", "profile", "GMAC", "weights MB", "limit ms", "takes ms", "reached", "products", "the rest")
_GPU = ("GPU", "", "prefill ms", "step ms", "flow ms", "vocoder ms", "first audio ms", "speech s per s")

Rows = Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table."""

    title: str
    head: tuple[str, ...]
    rows: Rows
    note: str


def write_reports(results: Results, folder: Path) -> None:
    """Write results.json, results.md and results.html."""
    folder.mkdir(parents=True, exist_ok=True)
    results.write(folder / "results.json")
    (folder / "results.md").write_text(render_markdown(results), encoding="utf-8")
    (folder / "results.html").write_text(render_html(results), encoding="utf-8")


def render_markdown(results: Results) -> str:
    """The page as Markdown."""
    blocks = [f"# {_TITLE}", results.date, "\n".join(f"- {key}: {value}" for key, value in _facts(results))]
    for section in _sections(results):
        lines = (section.head, ("---",) * len(section.head), *section.rows)
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        blocks += [f"## {section.title}", body, section.note]
    return "\n\n".join(filter(None, blocks)) + "\n"


def render_html(results: Results) -> str:
    """The page as HTML."""
    style = resources.files("cosytriton_engines.report").joinpath("templates/report.css").read_text("utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", _TITLE),
        element("style", Markup(style)),
    )
    facts = (join(element("dt", key), element("dd", str(value))) for key, value in _facts(results))
    header = element(
        "header", element("p", results.date, class_="kicker"), element("h1", _TITLE), element("dl", *facts)
    )
    charts = element("div", *_charts(results), class_="charts")
    body = element("body", element("main", header, charts, *map(_section, _sections(results))))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _section(section: Section) -> Markup:
    numeric = frozenset(range(1, len(section.head)))
    return element(
        "section",
        element("h2", section.title),
        table(section.head, [tuple(row) for row in section.rows], numeric, section.note or section.title),
    )


def _facts(results: Results) -> list[tuple[str, object]]:
    return [*results.settings.items(), *results.machine.items()]


def _sections(results: Results) -> Iterator[Section]:
    yield Section("Limits", ("figure", "measured", "limit", ""), _limits(results), "")
    for title, of_cpu in (("Figures", False), ("CPU seconds", True)):
        head, rows = _figures(results, of_cpu)
        if rows:
            note = "Medians ± half the range of the samples; in brackets, the gain over PyTorch."
            yield Section(title, head, rows, note)
    yield Section("What the figures are", ("case", "meaning"), _MEANING, "")
    if results.roofline:
        yield Section(
            "Roofline",
            _ROOF,
            [_roof(row) for row in results.roofline],
            "The limit is the time of the products at the machine's best rate, or of reading their weights. "
            "“Products” and “the rest” are shares of the nodes' time, measured with a profile.",
        )
        if gpus := _gpus(results):
            note = "Computed from the same counts and NVIDIA's peak rates, not measured: no GPU reaches it."
            yield Section("Limits on GPUs, computed", _GPU, gpus, note)


def _limits(results: Results) -> Rows:
    marks = {True: "met", False: "missed", None: ""}
    rows = []
    for one in CRITERIA:
        value = one.value(results.figures)
        given = "not measured" if value is None else f"{value:.3g}{one.unit}"
        limit = f"{one.sign} {one.limit:g}{one.unit}"
        rows.append((f"{one.group} {one.name}", given, limit, marks[one.met(results.figures)]))
    return rows


def _figures(results: Results, of_cpu: bool) -> tuple[tuple[str, ...], Rows]:
    """A row for each case, a column for each variant."""
    cases: dict[str, dict[str, Figure]] = {}
    for name, figure in results.figures.items():
        case, _, variant = name.partition("/")
        if (":" in case) == of_cpu:
            cases.setdefault(case, {})[variant] = figure
    variants = list(dict.fromkeys(variant for found in cases.values() for variant in found))
    variants.sort(key=lambda variant: variant != EAGER)
    head = ("case", "unit", *variants)
    rows = [
        (case, next(iter(found.values())).unit, *(_cell(found, variant) for variant in variants))
        for case, found in cases.items()
    ]
    return head, rows


def _cell(found: dict[str, Figure], variant: str) -> str:
    figure = found.get(variant)
    if figure is None:
        return "-"
    spread = f" ± {figure.spread:.2g}" if len(figure.samples) > 1 else ""
    return f"{figure.median:.4g}{spread}{_gain(found, variant)}"


def _gain(found: dict[str, Figure], variant: str) -> str:
    eager, figure = found.get(EAGER), found[variant]
    if eager is None or variant == EAGER or not figure.median or not eager.median:
        return ""
    gain = eager.median / figure.median if figure.lower_is_better else figure.median / eager.median
    return f" ({gain:.2f}x)"


def _roof(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["case"],
        row["profile"],
        f"{(row['fp32'] + row['int8']) / 1e9:.2f}",
        f"{row['weight_bytes'] / 1e6:.0f}",
        f"{row['limit'] * 1e3:.2f}",
        f"{row['seconds'] * 1e3:.2f}",
        f"{row['reached']:.0%}",
        f"{row['products']:.0%}",
        ", ".join(f"{kind} {share:.0%}" for kind, share in row["rest"]),
    )


def _gpus(results: Results) -> Rows:
    work = workload_of(results.settings)
    return [
        (
            one.gpu,
            one.precision,
            *(f"{seconds * 1e3:.2f}" for seconds in (one.prefill, one.step, one.flow, one.vocoder)),
            f"{one.first_audio * 1e3:.1f}",
            f"{one.streams:.0f}",
        )
        for one in expected(results.roofline, work)
    ]


def _charts(results: Results) -> Iterator[Markup]:
    for case, title in CHARTS:
        found = {
            variant: results.figures[f"{case}/{variant}"]
            for variant in _KINDS
            if f"{case}/{variant}" in results.figures
        }
        if len(found) < 2:
            continue
        longest = max(figure.median for figure in found.values())
        yield bars(
            title,
            [
                Bar(
                    variant,
                    figure.median / longest,
                    f"{figure.median * 1e3:,.1f} ms{_gain(found, variant)}",
                    _KINDS[variant],
                )
                for variant, figure in found.items()
            ],
        )
