"""The page of `fagen bench --html`: what it says, that it needs nothing else, and that a browser shows it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fagen.arch import resolve
from fagen.bench import compile as compile_bench
from fagen.bench import decode, documents, page, speed, variants
from fagen.bench.compile import CompileReport, Job, Timing
from fagen.bench.contestants import CUDNN, FA2, FLEX
from fagen.bench.decode import DecodeReport
from fagen.bench.documents import Run
from fagen.bench.page import Bar, Chart, Group
from fagen.bench.results import OURS, Machine
from fagen.bench.speed import CUDNN_PLAIN, PLAIN, SpeedReport
from fagen.bench.variants import Error, Kernel, Row, Variant, VariantsReport
from fagen.cli import main
from fagen.spec import AttentionSpec

MACHINE = Machine("NVIDIA H200 <&>", "sm90", "2.13.0", "CUDA 13.0")
EVIL = '<script>alert("1")</script> & \''


def compile_run() -> Run:
    spec = AttentionSpec(head_dim=128)
    timings = (
        Timing(Job("build, d128", "build", spec, goal=1.5, goal_ratio=5.0), (1.0, 0.9, 1.2), 4.0),
        Timing(Job("warm build", "build", spec, warm=True, goal=0.3), (0.4, 0.4, 0.4), 1.6),
    )
    return Run(CompileReport("empty", (0.25, 0.24, 0.26), timings, "nvrtc 13.0.88", None, 2), "2026-01-02", EVIL)


def forward_run() -> Run:
    results = (
        speed.Result(
            speed.Row(128, True, 4096),
            {OURS: 550.0, FA2: 300.0, CUDNN: 500.0, FLEX: None},
            1.5e-3,
            FA2,
            {FLEX: EVIL},
            matmul=700.0,
        ),
        speed.Result(speed.Row(64, False, 1024), {OURS: 200.0, FA2: 210.0}),
        speed.Result(speed.Row(128, True, 4096, softcap=True), {OURS: 300.0, PLAIN: 330.0, CUDNN_PLAIN: 500.0}),
    )
    return Run(SpeedReport(MACHINE, results, {OURS: 12.34, "SDPA": 17.0}), "2026-01-03", "fagen bench --forward")


def decode_run() -> Run:
    results = (decode.Result(decode.rows()[0], {OURS: 3.0, CUDNN: 2.9, decode.COPY: 4.0, FA2: None}),)
    return Run(DecodeReport(MACHINE, results, {"fwd": 98304}), "2026-01-04", "fagen bench --decode")


def variants_run() -> Run:
    found = (
        Variant(
            Row(AttentionSpec(head_dim=128, causal=True, softcap=True)),
            (Kernel("fwd", 0.5, 255, 8, 81920, 46000),),
            (Error("o", 2.0e-3, 2.5e-3, 1.5e-3, True), Error("lse", 2e-5, 1e-4, None, True)),
        ),
        Variant(Row(AttentionSpec(head_dim=64, dtype="fp16")), failure=EVIL),
        Variant(
            Row(AttentionSpec(head_dim=64)),
            (Kernel("fwd", 0.4, None, None, 0, 46000),),
            (Error("o", float("nan"), 2.5e-3, None, False), Error("lse", 0.0, 1e-4, None, True)),
        ),
    )
    report = VariantsReport("CPU (emulated)", "sm80", "2.13.0", "nvrtc 13.0.88", found)
    return Run(report, "2026-01-05", "fagen bench --variants")


RUNS = (compile_run(), forward_run(), decode_run(), variants_run())


class Page(HTMLParser):
    """The tags of a page, each with its attributes, and its text; fails where tags do not match."""

    VOID = frozenset({"meta", "rect", "line"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def shown() -> Page:
    return Page(page.html(RUNS))


def test_it_needs_no_other_file_and_runs_nothing(shown: Page) -> None:
    assert {tag for tag, _ in shown.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base"})
    for _, attributes in shown.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")]
        assert (attributes.get("href") or "#").startswith("#")
    style = page.html(RUNS).split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    policy = next(tag["content"] for tag in shown.of("meta") if tag.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_string_is_escaped(shown: Page) -> None:
    assert EVIL in shown.texts  # the command
    assert f"d64 fp16 failed: {EVIL}" in shown.texts and "NVIDIA H200 <&>" in shown.texts
    assert "alert" not in " ".join(str(value) for _, attributes in shown.tags for value in attributes.values())


def test_all_is_there(shown: Page) -> None:
    text = " ".join(shown.texts)
    for expected in (
        "2026-01-02",
        "1 of 2 rows with a goal reach it",
        "1.10 times cuDNN in the mean over 1 problem, 0 of 2 goals reached",  # not with softcap
        "Host time of a call",
        "Flex failed in 1 of 3 rows",
        "1 of 3 variants within budget",
    ):
        assert expected in text, expected
    assert "550 (1.10)" in shown.texts and "2.0e-03 (80 %)" in shown.texts and "255, 8 B spilled" in shown.texts
    assert shown.texts.count("missed") == 1 and shown.texts.count("wrong") == 2 and "the worst error at inf %" in text
    assert sum(text == "1.5e-03" for text in shown.texts) == 3  # of PyTorch's kernel: bar and table; a difference


def test_it_can_be_read_by_everyone(shown: Page) -> None:
    (language,) = shown.of("html")
    assert language["lang"] == "en"
    assert len(shown.of("h1")) == 1 and "width=device-width" in str(shown.of("meta"))
    for svg in shown.of("svg"):
        assert svg.get("aria-hidden") == "true" or (svg["role"] == "img" and svg["aria-label"])
    ids = [attributes["id"] for _, attributes in shown.tags if "id" in attributes]
    assert len(set(ids)) == len(ids) and {f"#{name}" for name in ids} >= {str(a["href"]) for a in shown.of("a")}
    assert all(cell["scope"] in ("row", "col") for cell in shown.of("th"))


def luminance(color: str) -> float:
    """Relative luminance of "#rgb" or "#rrggbb", as WCAG 2 defines it."""
    digits = color[1:] if len(color) == 7 else "".join(digit * 2 for digit in color[1:])
    parts = [int(digits[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_contrast(mode: int) -> None:
    """WCAG 2 AA: 4.5 for text; 3 for what a bar is seen by, but for the pale ones, whose values stand beside them."""
    css = (Path(page.__file__).parent / "page.css").read_text()
    colors = dict(re.findall(r"--([\w-]+): (#\w+)", css.split("@media (prefers-color-scheme: dark)")[mode]))
    names = re.findall(r"\.([\w-]+) \{ fill: var\(--([\w-]+)\)", css)
    assert {name for name, _ in names} >= set(page._STYLES.values()) and "paper" in colors

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(colors[a]), luminance(colors[b])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for text in ("ink", "quiet", "bad"):
        assert contrast(text, "paper") >= 4.5 and contrast(text, "panel") >= 4.5, text
    for _, color in names:
        assert contrast(color, "paper") >= (1.9 if color.endswith("pale") else 2.7), color


def test_bars_are_as_long_as_their_values() -> None:
    groups = (Group("a", (Bar("x", 50.0, "50"), Bar("y", 100.0, "100", low=90.0, high=125.0)), 75.0),)
    chart = Chart("title", "unit", groups)
    assert chart.limit == pytest.approx(130) and chart.step == 50 and chart.ticks == (0, 50, 100)
    assert chart.place(65) == "50.00%" and chart.place(-1) == "0.00%" and chart.place(float("nan")) == "100.00%"
    text = page.html([forward_run()])
    widths = [float(width) for width in re.findall(r'class="(?:ours|other-\d)"[^>]* width="([\d.]+)%"', text)]
    ours, fa2, cudnn = widths[2:5]  # after the two ratios
    assert ours / fa2 == pytest.approx(550 / 300, abs=1e-2) and ours / cudnn == pytest.approx(1.1, abs=1e-2)


@pytest.mark.parametrize("values", [(), (0.0,), (float("inf"),), (float("nan"), 1e-9), (1e300,)])
def test_an_axis_for_any_values(values: tuple[float, ...]) -> None:
    chart = Chart("", "", (Group("", tuple(Bar("", value, "") for value in values)),))
    assert 0 < chart.limit < float("inf") and 2 <= len(chart.ticks) <= 7
    assert all(0 <= float(chart.place(value)[:-1]) <= 100 for value in values)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.measured)
def test_a_saved_run_is_read_back(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fagen.cli import output

    output.emit(documents.of(run))
    path = tmp_path / "run.json"
    path.write_text(capsys.readouterr().out)
    (again,) = documents.read(path)
    assert repr(again) == repr(run)  # NaN equals nothing
    assert page.html([again]) == page.html([run])


def saved(tmp_path: Path, runs: tuple[Run, ...] = (compile_run(), forward_run())) -> Path:
    path = tmp_path / "saved.json"
    path.write_text(json.dumps({"documents": [documents.of(run) for run in runs]}))
    return path


def test_saved_runs_are_shown_as_if_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = saved(tmp_path), tmp_path / "page.html"
    target.write_text("an old page")
    assert main(["bench", "--from", str(path), "--html", str(target), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| build, d128 | 1.000 | 4.0 | 1.5 s, 5 x |" in out and "| d128 causal 4k | 550 (1.10) |" in out
    assert target.read_text() == page.html([compile_run(), forward_run()])
    assert sorted(tmp_path.iterdir()) == [target, path] and target.stat().st_mode & 0o777 == 0o644
    assert main(["bench", "--from", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: "[]", "is not what this version"),
        (lambda d: "{", "is not JSON"),
        (lambda d: json.dumps({"measured": "compile"}), "no field 'rows'"),
        (lambda d: json.dumps(d | {"measured": "lunch"}), "'lunch', none of compile, forward"),
        (lambda d: json.dumps(d | {"rows": []}), "it has no rows"),
        (lambda d: json.dumps(d | {"rows": [d["rows"][0] | {"all_seconds": ["soon"]}]}), "valid number"),
        (lambda d: json.dumps(d | {"rows": [d["rows"][0] | {"all_seconds": []}]}), "no median"),
    ],
)
def test_a_file_that_is_no_saved_run(
    change: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved.json"
    path.write_text(change(json.loads(json.dumps(documents.of(compile_run())))))
    assert main(["bench", "--from", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and problem in error and str(path) in error


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--compile", "--html", "nowhere/page.html"], "no such file or directory"),
        (["--compile", "--html", "/proc/page.html"], "'/proc/page.html' cannot be written"),
        (["--compile", "--html", "page.png"], "is not named .html"),
        (["--compile", "--html", "folder.html"], "is a directory"),
        (["--from", "nothing.json", "--html", "page.html"], "--from 'nothing.json': no such file"),
        (["--from", "nothing.json", "--compile"], "leave out --compile"),
        (["--from", "nothing.json", "--rows", "d128"], "leave out --rows"),
        (["--compile", "--variants"], "several with --html"),
        (["--html", "page.html"], "say what to measure"),
        (["--variants", "--repeats", "3"], "--repeats belongs to what is timed"),
        (["--variants", "--rows", "d9"], "matches none of: d64"),
        (["--forward", "--backward", "--html", "page.html", "--plot", "x.png"], "--plot draws one of"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    for module in (compile_bench, speed, variants):
        monkeypatch.setattr(module, "run", lambda *_, **__: pytest.fail("measured before it looked"))
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_a_page_of_compile_times_has_the_variants_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real variant, built and run emulated where there is no GPU."""
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_bench, "run", lambda *_, **__: compile_run().report)
    target = tmp_path / "page.html"
    assert main(["bench", "--compile", "--rows", "d64", "--html", str(target), "--json"]) == 0
    captured = capsys.readouterr()
    first, second = json.loads(captured.out)["documents"]
    assert (first["measured"], second["measured"]) == ("compile", "variants") and "written: " in captured.err
    (row,) = second["rows"]
    assert row["name"] == "d64" and row["passed"] and [kernel["kind"] for kernel in row["kernels"]] == ["fwd"]
    errors = {error["name"]: error for error in row["errors"]}
    assert 0 < errors["o"]["error"] < errors["o"]["budget"] and errors["lse"]["passed"]
    assert "d64" in Page(target.read_text()).texts
    # Rows of the other measurement alone leave the variants out.
    assert main(["bench", "--compile", "--rows", "warm", "--html", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == "compile"


def test_a_wrong_variant_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(variants, "run", lambda *_, **__: variants_run().report)
    assert main(["bench", "--variants", "--arch", "sm80"]) == 1
    captured = capsys.readouterr()
    assert "d128 causal softcap" in captured.out and "wrong" in captured.out and "d64 fp16 failed" in captured.err
    right = dataclasses.replace(variants_run().report, variants=variants_run().report.variants[:0])
    monkeypatch.setattr(variants, "run", lambda *_, **__: right)
    assert main(["bench", "--variants", "--arch", "sm80"]) == 0


def test_the_variants_have_every_feature() -> None:
    rows = variants.rows()
    assert len({row.name for row in rows}) == len(rows)
    features = {feature for row in rows for feature in row.spec.features}
    assert features >= {"causal", "window", "softcap", "alibi", "dropout", "varlen", "paged", "split_kv", "backward"}
    assert {row.spec.dtype for row in rows} == {"bf16", "fp16"} and {row.spec.head_dim for row in rows} >= {
        64,
        128,
        256,
    }


@pytest.mark.parametrize(
    ("arch", "cards"),
    [("sm80", {"80", "86", "89"}), ("sm86", {"86", "89"}), ("sm90", {"90"}), ("sm90a", {"90"}), ("sm80+ptx", None)],
)
def test_which_card_runs_what(arch: str, cards: set[str] | None) -> None:
    """CUDA programming guide, binary compatibility and PTX compatibility."""
    every = {"75": (7, 5), "80": (8, 0), "86": (8, 6), "89": (8, 9), "90": (9, 0), "100": (10, 0), "120": (12, 0)}
    expected = {*every} - {"75"} if cards is None else cards
    assert {name for name, card in every.items() if variants.runs_on(resolve(arch), card)} == expected


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


def browse(path: Path, width: int) -> tuple[Path, list[str], list[str]]:
    """What headless Chromium makes of a page: a picture, the lines of its console, and the URLs that the page asked for
    (not the browser itself). There is no network."""
    assert CHROMIUM is not None
    log, picture = path.with_suffix(".net.json"), path.with_suffix(".png")
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    switches += ["--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
    switches += [f"--user-data-dir={path.parent / 'profile'}", f"--log-net-log={log}", f"--screenshot={picture}"]
    done = subprocess.run(
        [CHROMIUM, *switches, f"--window-size={width},3000", path.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"HOME": str(path.parent)},
    )
    assert done.returncode == 0, done.stderr
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    asked = [event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"]
    return picture, [line for line in done.stderr.splitlines() if "CONSOLE" in line], asked


@needs_chromium
def test_a_browser_would_tell(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<!DOCTYPE html><img src="http://fagen.invalid/x.png" alt=""><script>console.error("no")</script>')
    _, console, asked = browse(path, 500)
    assert len(console) >= 1 and asked == ["http://fagen.invalid/x.png"]


@needs_chromium
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_it(width: int, tmp_path: Path) -> None:
    """It draws bars, has nothing to complain of, asks for no other resource, and leaves the margin free."""
    image_module = pytest.importorskip("matplotlib.image")
    path = tmp_path / "page.html"
    page.save(RUNS, path)
    picture, console, asked = browse(path, width)
    assert console == [] and asked == []
    image = image_module.imread(picture)[:, :, :3]
    assert image.shape[1] == width
    for color in ("#c2341d", "#2f7d32"):  # fagen's bars and cuDNN's, of the light colours
        rgb = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        assert (abs(image - rgb).max(axis=2) < 0.02).sum() > 2000, color
    assert (abs(image[:, -8:] - image[0, -1]) < 0.02).all(), "something reaches over the right margin"
