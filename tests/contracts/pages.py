"""A page as a reader gets it, and a profile that has everything to show."""

import json
from html.parser import HTMLParser

from contracts.windows import step_time, stepping

from kvtune.autotune.report.page import Page, render_page
from kvtune.autotune.report.view import ProfileView, WorkloadView
from kvtune.policies.model_flops import TokenFlops
from kvtune.profilers.arrivals import Arrivals
from kvtune.profilers.prefix_use import prefix_use
from kvtune.profilers.roofline import roofline
from kvtune.profilers.step_parts import step_parts
from kvtune.profilers.verdict import judge
from kvtune.profilers.window import CACHED, PROMPTS
from kvtune.types import (
    Ceilings,
    Device,
    EffectiveConfig,
    Forecast,
    Histogram,
    Interval,
    Profile,
    WorkloadFingerprint,
)

VOID = {"meta", "img", "br", "link"}
FLOPS = TokenFlops(layers_flop=200e6, head_flop=50e6, context_flop=70e3)
PEAKS = {"peak_flops_per_s": 1e12, "peak_bytes_per_s": 50e9}
DEVICE = Device(kind="cpu", name="a processor", count=1, memory_bytes=None)


class Parsed(HTMLParser):
    """The elements of a page, and the text in each kind of element."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], {}, []
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]][-1] += data

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def rows(self):
        """Cells of all tables' rows, heads included."""
        cells = iter(self.texts.get("td", []))
        heads = iter(self.texts.get("th", []))
        rows = []
        for tag, _ in self.elements:
            if tag == "tr":
                rows.append([])
            elif tag in ("td", "th"):
                rows[-1].append(next(cells if tag == "td" else heads))
        return rows

    @property
    def plots(self):
        """What Plotly is given, by the caption of the figure."""
        given = [
            json.loads(text)
            for text, attributes in zip(self.texts["script"], self.of("script"), strict=True)
            if attributes.get("type") == "application/json"
        ]
        captions = [text for text in self.texts["strong"] if text.endswith(".")]
        return dict(zip(captions, given, strict=True))


def parsed(page: Page) -> Parsed:
    return Parsed(render_page(page))


def lengths(*edges, counts):
    return Histogram(edges=edges, counts=counts, mean=50.0, p50=48.0, p95=99.0, p99=None)


def fingerprint(**changed):
    known = {
        "requests": 200,
        "input_tokens": lengths(32, 64, 128, counts=(150, 50)),
        "output_tokens": lengths(8, 16, counts=(200,)),
        "duration_s": 50.0,
        "request_rate_per_s": 4.0,
        "burstiness": 1.5,
        "reusable_prefix_share": {16: 0.8, 128: 0.5},
    }
    return WorkloadFingerprint(**{**known, **changed})


def workload(**changed):
    found = changed.pop("fingerprint", fingerprint())
    known = {
        "name": "chat",
        "fingerprint": found,
        "prompts": found.input_tokens if found else None,
        "answers": found.output_tokens if found else None,
        "arrivals": Arrivals(0.5, (1, 0, 4)),
    }
    return WorkloadView(**{**known, **changed})


def forecast(lever, metric, estimate, *, low=None, high=None, **more):
    ratio = None
    if estimate is not None:
        ratio = Interval(estimate=estimate, low=low, high=high, unit="ratio")
    known = {"arguments": {}, "unit": "", "reason": f"{lever} does it", "ratio": ratio}
    return Forecast(lever=lever, metric=metric, **{**known, **more})


def seen(**changed):
    """A window with a step-time model, ceilings and a prefix cache that serves 40%."""
    known = {
        "step_time": step_time(0.02, 0.0025, 10e-6, weight_read_s=0.015),
        "counters": {PROMPTS: 2000, CACHED: 800},
        "effective": {"block_size_tokens": 128, "enable_prefix_caching": True},
        "reusable_prefix_share": {16: 0.8, 128: 0.5},
    }
    return stepping(**{**PEAKS, **known, **changed})


def profile_view(window=None, flops=FLOPS, *, forecasts=(), view=None, **changed):
    window = window or seen()
    effective = window.effective or EffectiveConfig()
    verdict = judge(window)
    profile = Profile(
        **{
            "model": "org/small",
            "endpoint_url": "http://localhost:8000",
            "device": DEVICE,
            "engine": None,
            "effective": effective,
            "fingerprint": None,
            "metrics": {"goodput_requests_per_s": (1.5,), "ttft_p95_s": (0.25,)},
            "counters": dict(window.counters),
            "window_s": window.window_s,
            "verdict": verdict,
            "step_time": window.step_time,
            "ceilings": Ceilings(
                device=DEVICE.key,
                read_bytes_per_s=50e9,
                copy_bytes_per_s=40e9,
                matrix_flop_per_s=1e12,
                matrix_dtype="bfloat16",
                threads=2,
                method="by hand",
                measured_at="",
            ),
            **changed,
        }
    )
    return ProfileView(
        profile=profile,
        forecasts=tuple(forecasts),
        workload=view or workload(),
        prefix=prefix_use(window),
        parts=step_parts(window, verdict.shares),
        roofline=roofline(window, flops, 1),
    )
