"""The report of a build, read as a browser and as a screen reader would."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from cosytriton_engines.errors import BuildError
from cosytriton_engines.precision.search import Trial
from cosytriton_engines.quality.evaluate import measure_outputs
from cosytriton_engines.report.charts import Bar, bars
from cosytriton_engines.report.html import MOST_LAYERS, render_html
from cosytriton_engines.report.markdown import render_markdown
from cosytriton_engines.report.markup import element
from cosytriton_engines.report.pictures import DIFFERENCE_DB, FRAMES, Picture, picture_of, png
from cosytriton_engines.report.report import UNTRAINED, Machine, Report, StageReport
from cosytriton_engines.report.writer import check_name, write_report

EXACT = {"not_finite": 0.0, "mel_snr": 120.0, "mel_distance": 0.0}
REASON = "without it mel distance is 1.930 dB"
FLOW = StageReport(
    model="flow",
    precision="int8",
    artifact="model.int8.onnx",
    megabytes=113.2,
    fp32_megabytes=453.0,
    figures={"not_finite": 0.0, "mel_snr": 23.1, "mel_distance": 0.72},
    floor=EXACT,
    speed_ratio=1.42,
    kept={"decoder.final_proj/Conv": REASON},
    trials=(
        Trial(0, {"mel_snr": 14.0, "mel_distance": 1.93}, passed=False),
        Trial(1, {"mel_snr": 23.1, "mel_distance": 0.72}, passed=True),
    ),
    sensitivity={"decoder.final_proj/Conv": math.inf}
    | {f"decoder.blocks.{i}/MatMul": 10.0 ** (-2 - i / 10) for i in range(30)},
)
VOCODER = StageReport(
    "vocoder", "fp16", "model.fp16.onnx", 41.5, 83.0, {"not_finite": 0.0, "log_spectral_distance": 0.7}
)
MACHINE = Machine("AMD EPYC 9B14", 2, "1.32.0")
REPORT = Report(
    checkpoint="my voice <1>",
    family="CosyVoice2-0.5B",
    untrained=False,
    calibration="3f7ac91be2d41d7e",
    warnings=("2 recordings: 100 or more are better",),
    machine=MACHINE,
    date="2026-11-30 16:20 UTC",
    stages=(FLOW, VOCODER),
)


class Page(HTMLParser):
    """Elements with their attributes, and the text of each table row; complains about unbalanced tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


# ---- content ------------------------------------------------------------------------------------------


def test_tables_say_figures_tolerances_and_verdicts() -> None:
    page = Page(render_html(REPORT))
    assert [
        "flow",
        "✓ pass",
        "int8.onnx",
        "113",
        "25%",
        "1.42x",
        "mel SNR",
        "23.1 dB",
        "≥ 20.0 dB",
    ] in page.rows
    assert ["mel distance", "✓ pass", "0.720 dB", "≤ 1.000 dB", "0.000 dB"] in page.rows
    assert ["log spectral distance", "✕ fail", "0.700 dB", "≤ 0.500 dB", "-"] in page.rows
    assert ["waveform SNR", "", "not measured", "informs", "-"] in page.rows


def test_failures_stand_out() -> None:
    """In the overview and in the variant's own table; what passes has no such mark."""
    marked = [a for a in Page(render_html(REPORT)).all("span") if a.get("class") == "fail"]
    assert len(marked) == 2


def test_head_says_what_was_measured_where() -> None:
    text = Page(render_html(REPORT)).text
    for fact in ("my voice <1>", "CosyVoice2-0.5B", REPORT.calibration, str(MACHINE), REPORT.date):
        assert fact in text
    assert str(MACHINE) == "AMD EPYC 9B14, 2 cores, no GPU, ONNX Runtime 1.32.0"
    assert "1 of 2 variants are within their tolerance of FP32. Beyond it: vocoder fp16" in text
    assert "2 recordings: 100 or more are better" in text


def test_all_well_is_said_shortly() -> None:
    assert replace(REPORT, stages=(FLOW,)).summary == "Every variant is within its tolerance of FP32."


def test_untrained_checkpoint_is_remarked() -> None:
    for untrained in (True, False):
        report = replace(REPORT, untrained=untrained)
        assert (UNTRAINED in Page(render_html(report)).text) is untrained
        assert (UNTRAINED in render_markdown(report)) is untrained


def test_kept_layers_come_with_their_reason() -> None:
    page = Page(render_html(REPORT))
    assert "1 layer is kept in higher precision" in page.text
    assert f"{REASON}:decoder.final_proj/Conv" in page.text


def test_nan_is_shown_first() -> None:
    samples = np.ones((1, 2000), np.float32)
    count = np.full((1, 1), 2000, np.int32)
    pair = [{"waveform": w, "sample_count": count} for w in (samples, samples * np.float32(np.nan))]
    broken = replace(VOCODER, figures=measure_outputs("vocoder", [(pair[0], pair[1])]))
    assert broken.judged.name == "not_finite"
    rows = Page(render_html(replace(REPORT, stages=(broken,)))).rows
    assert [row[:2] for row in rows if row[0] == "NaN or infinite"] == [["NaN or infinite", "✕ fail"]]


# ---- charts -------------------------------------------------------------------------------------------


def test_charts_are_titled_and_spoken() -> None:
    page = Page(render_html(REPORT))
    spoken = [str(svg["aria-label"]) for svg in page.all("svg")]
    assert all(svg["role"] == "img" for svg in page.all("svg"))
    assert "Size of flow: fp32 453 MB; int8.onnx 113 MB, 25%" in spoken
    assert any("0 layers kept, 1.930 dB; 1 layers kept, 0.720 dB" in label for label in spoken)
    assert len(page.all("figcaption")) == len(page.all("figure")) == len(spoken)


def test_bars_are_as_long_as_their_share() -> None:
    widths = [rect["width"] for rect in Page(bars("t", [Bar("a", 0.25, "1", "int8")])).all("rect")]
    assert widths == ["100%", "25.0%"]


def test_the_most_sensitive_layers_are_drawn() -> None:
    """What overflows leads; of 31 layers the 20 loudest are there."""
    label = next(str(s["aria-label"]) for s in Page(render_html(REPORT)).all("svg") if "Noise" in str(s))
    assert label.count("; ") == MOST_LAYERS  # one more stands in the title
    assert "first: decoder.final_proj/Conv kept overflows; decoder.blocks.0/MatMul -20.0 dB" in label
    assert f"decoder.blocks.{MOST_LAYERS - 2}/" in label
    assert f"decoder.blocks.{MOST_LAYERS - 1}/" not in label


def test_curve_marks_the_graphs_that_pass() -> None:
    page = Page(render_html(REPORT))
    assert [c["class"] for c in page.all("circle")] == ["point", "point good"]
    heights = [float(str(c["cy"])) for c in page.all("circle")]
    limit = next(float(str(x["y1"])) for x in page.all("line") if x["class"] == "limit")
    assert heights[0] < limit < heights[1], "a distance beyond the limit lies above it"


# ---- pictures -----------------------------------------------------------------------------------------


def pixels(uri: str) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Palette indices of an inline image [height, width]; checks the sums of its chunks."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, offset = {}, 8
    while offset < len(data):
        size = struct.unpack_from(">I", data, offset)[0]
        kind, body = data[offset + 4 : offset + 8], data[offset + 8 : offset + 8 + size]
        assert struct.unpack_from(">I", data, offset + 8 + size)[0] == zlib.crc32(kind + body)
        chunks[kind], offset = body, offset + 12 + size
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    luminance = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(256, 3) @ [0.3, 0.6, 0.1]
    assert (np.diff(luminance) > -0.5).all(), "brighter is louder, also without colours"
    return lines[:, 1:]


def test_picture_has_time_to_the_right_and_low_bands_at_the_bottom() -> None:
    levels = np.array([[0, 40], [80, np.nan]], np.float32)  # [frames, bands]
    assert pixels(png(levels, 0, 80)).tolist() == [[128, 255], [0, 255]]


def test_mel_and_spectrum_become_pictures() -> None:
    mel = {"mel": np.zeros((2, 500, 80), np.float32), "frame_count": np.array([[450], [500]])}
    louder = mel | {"mel": mel["mel"] + np.float32(np.log(2))}
    picture = picture_of("flow", mel, louder)
    assert picture is not None
    assert picture.reference.shape == (FRAMES, 80)
    np.testing.assert_allclose(picture.variant - picture.reference, 20 * np.log10(2), rtol=1e-5)
    tone = np.sin(np.pi / 2 * np.arange(24_000))[None].astype(np.float32)  # a quarter of the rate
    picture = picture_of("vocoder", *[{"waveform": tone, "sample_count": np.array([[24_000]])}] * 2)
    assert picture is not None
    assert set(picture.reference.argmax(axis=1)) <= {63, 64}
    assert picture_of("speech_lm", {}, {}) is None


def test_strips_show_fp32_the_variant_and_their_difference() -> None:
    levels = np.full((30, 80), -20, np.float32)
    picture = Picture("mel", levels, levels + np.float32(DIFFERENCE_DB / 2))
    page = Page(render_html(replace(REPORT, stages=(replace(FLOW, picture=picture),))))
    images = page.all("img")
    assert [image["alt"] for image in images] == ["mel, FP32", "mel, variant", "mel, difference"]
    assert (pixels(str(images[2]["src"])) == 128).all()


# ---- the page -----------------------------------------------------------------------------------------


def test_nothing_is_fetched_and_nothing_runs() -> None:
    picture = Picture("mel", np.zeros((3, 80), np.float32), np.zeros((3, 80), np.float32))
    html = render_html(replace(REPORT, stages=(replace(FLOW, picture=picture),)))
    page = Page(html)
    assert not {"script", "link", "iframe", "object", "use"} & {tag for tag, _ in page.elements}
    sources = [a[key] or "" for _, a in page.elements for key in ("src", "href", "srcset") if key in a]
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert not re.search(r"https?:|url\(|@import", html)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]


def test_links_lead_somewhere() -> None:
    page = Page(render_html(REPORT))
    targets = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {str(a["href"])[1:] for a in page.all("a")} == targets - {None}


def test_tables_have_heads_and_captions() -> None:
    page = Page(render_html(REPORT))
    assert len(page.all("caption")) == len(page.all("thead")) == len(page.all("table"))
    assert {th["scope"] for th in page.all("th")} == {"row", "col"}
    assert page.all("html")[0]["lang"] == "en"


def test_every_text_is_escaped() -> None:
    evil = '"><script>alert(1)</script>'
    stage = replace(FLOW, artifact=evil, kept={evil: evil}, sensitivity={evil: 0.1})
    machine = replace(MACHINE, cpu=evil)
    html = render_html(
        Report(evil, evil, True, evil, (evil,), machine, evil, (stage, replace(VOCODER, artifact=evil)))
    )
    assert "<script" not in html
    assert Page(html).text.count(evil) > 8
    assert element("p", "<", title='"&') == '<p title="&quot;&amp;">&lt;</p>'


def test_same_report_same_bytes() -> None:
    assert render_html(REPORT) == render_html(replace(REPORT))
    assert render_markdown(REPORT) == render_markdown(replace(REPORT))


def test_colours_exist_for_both_schemes() -> None:
    """Each colour that is used is defined, light and dark."""
    style = re.search(r"<style>(.*)</style>", render_html(REPORT), re.DOTALL)
    assert style is not None
    used = set(re.findall(r"var\((--[\w]+)\)", style[1]))
    light, dark = re.findall(r":root \{(.*?)\}", style[1], re.DOTALL)
    for scheme in (light, dark):
        assert set(re.findall(r"(--[\w]+):", scheme)) == used


# ---- Markdown and files -------------------------------------------------------------------------------


def test_markdown_has_the_same_figures() -> None:
    text = render_markdown(REPORT)
    assert text.startswith("# Precision report: my voice &lt;1>\n\n1 of 2 variants")
    assert "| flow | int8 `model.int8.onnx` | 113 | 25% | 1.42x | ✓ pass |" in text
    assert "| log spectral distance | ✕ fail | 0.700 dB | ≤ 0.500 dB | - |" in text
    assert f"- {REASON}: `decoder.final_proj/Conv`" in text


def test_name_decides_the_format(tmp_path: Path) -> None:
    write_report(REPORT, tmp_path / "new" / "report.html")
    write_report(REPORT, tmp_path / "report.md")
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == render_html(REPORT)
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == render_markdown(REPORT)
    with pytest.raises(BuildError, match=r"named \.html or \.md, not 'report\.pdf'"):
        check_name(tmp_path / "report.pdf")


def test_this_machine() -> None:
    machine = Machine.here(gpu="NVIDIA L4")
    assert machine.cpu
    assert machine.cores >= 1
    assert "NVIDIA L4, ONNX Runtime 1." in str(machine)
