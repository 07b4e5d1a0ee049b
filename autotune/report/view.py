"""What a reader is shown of a workload and of a profile, the same in the terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtune.autotune.profiling import Subject, devices_sharing, window_of
from kvtune.autotune.words import amount, digits
from kvtune.errors import BadInput
from kvtune.policies.model_config import load_config
from kvtune.policies.model_flops import TokenFlops, token_flops_of
from kvtune.profilers.arrivals import Arrivals, arrivals
from kvtune.profilers.prefix_signs import BEYOND_LEAST_SHARE, PREFIX_LEAST_SHARE
from kvtune.profilers.prefix_use import PrefixUse, prefix_use
from kvtune.profilers.roofline import Roofline, Work, roofline
from kvtune.profilers.server_lengths import ANSWERS, PROMPTS, server_lengths
from kvtune.profilers.step_parts import StepParts, step_parts
from kvtune.profilers.window import LOOKUPS_MOST_PER_PROMPT
from kvtune.types import Forecast, Histogram, LoadRun, Profile, WorkloadFingerprint


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """What a workload looks like.

    `prompts` and `answers` are lengths in tokens; `counted_by` says who counted them. `arrivals`
    are those in the file, or those that were sent (`arrivals_are`). `reusable` maps block sizes to
    the share of prompt tokens that an unbounded prefix cache would serve.
    """

    name: str
    fingerprint: WorkloadFingerprint | None
    prompts: Histogram | None
    answers: Histogram | None
    counted_by: str = "in the file"
    arrivals: Arrivals | None = None
    arrivals_are: str = "in the file"

    @property
    def reusable(self) -> Mapping[int, float]:
        """The share of prompt tokens that comes again, by block size."""
        found = self.fingerprint
        return {} if found is None else dict(sorted(found.reusable_prefix_share.items()))

    @property
    def summary(self) -> str:
        """Requests, and how they come."""
        found = self.fingerprint
        if found is None:
            return "the requests of others"
        text = f"{found.requests:,} requests"
        if found.duration_s is not None:
            text += (
                f" over {found.duration_s:,.0f} s: {amount(found.request_rate_per_s)} a second, "
                f"burstiness {amount(found.burstiness)} (1 is Poisson)"
            )
        return text

    @property
    def missing(self) -> tuple[str, ...]:
        """What cannot be shown, and why."""
        lost = []
        names = {"prompt lengths": self.prompts, "output lengths": self.answers}
        lost += [
            f"{name}: the file does not state them in tokens, and no server counted them"
            for name, found in names.items()
            if found is None
        ]
        if self.arrivals is None:
            lost.append("arrivals: the requests carry no times that differ")
        if self.fingerprint is not None and not self.reusable:
            lost.append("reusable prefixes: no token ids or prefix blocks are in the file")
        return tuple(lost)


@dataclass(frozen=True, slots=True)
class ProfileView:
    """A profile with what can be worked out of it; `None` and empty are not known."""

    profile: Profile
    forecasts: tuple[Forecast, ...]
    workload: WorkloadView
    prefix: PrefixUse
    parts: StepParts | None
    roofline: Roofline

    @property
    def block_tokens(self) -> int | None:
        """Tokens in a block of the server's cache."""
        effective = self.profile.effective
        return None if effective is None else effective.block_size_tokens


def workload_view(
    name: str, fingerprint: WorkloadFingerprint, arriving: Arrivals | None
) -> WorkloadView:
    """View a workload by itself."""
    return WorkloadView(
        name=name,
        fingerprint=fingerprint,
        prompts=fingerprint.input_tokens,
        answers=fingerprint.output_tokens,
        arrivals=arriving,
    )


def profile_view(
    profile: Profile,
    run: LoadRun,
    subject: Subject,
    *,
    is_load_ours: bool,
    workload_name: str,
    forecasts: Sequence[Forecast],
) -> ProfileView:
    """View a profile with the `run` that it was judged by.

    Lengths are those that the server counted, where the workload does not state them.
    """
    window = window_of(
        subject,
        run,
        metrics={name: values[-1] for name, values in profile.metrics.items()},
        is_load_ours=is_load_ours,
        ceilings=profile.ceilings,
        step_time=profile.step_time,
    )
    seen = profile.fingerprint
    prompts = seen.input_tokens if seen is not None else None
    answers = seen.output_tokens if seen is not None else None
    by_server = prompts is None or answers is None
    return ProfileView(
        profile=profile,
        forecasts=tuple(forecasts),
        workload=WorkloadView(
            name=workload_name,
            fingerprint=seen,
            prompts=prompts or server_lengths(profile.counters, PROMPTS),
            answers=answers or server_lengths(profile.counters, ANSWERS),
            counted_by="in the file, or by the server" if by_server else "in the file",
            arrivals=arrivals(record.sent_s for record in run.records),
            arrivals_are="as sent",
        ),
        prefix=prefix_use(window),
        parts=step_parts(window, profile.verdict.shares),
        roofline=roofline(window, _flops(subject.model), devices_sharing(subject)),
    )


def prefix_notes(view: ProfileView) -> tuple[str, ...]:
    """What to make of the share of prompt tokens that the server's cache served."""
    use, effective = view.prefix, view.profile.effective
    if effective is not None and effective.enable_prefix_caching is False:
        return ("prefix caching is off on this server",)
    notes = []
    if use.hits is None:
        again = (use.lookups_per_prompt or 0.0) > LOOKUPS_MOST_PER_PROMPT
        notes.append(
            "what was served is not known: requests that waited were looked up again, so that "
            "counted hits hold tokens of their own"
            if again
            else "what was served is not known: the server's counters do not tell"
        )
    if use.missed is not None and use.missed >= PREFIX_LEAST_SHARE:
        notes.append(f"{use.missed:.0%} of the prompt tokens came before and were computed again")
    if use.beyond is not None and use.beyond >= BEYOND_LEAST_SHARE:
        notes.append(
            f"{use.beyond:.0%} of the prompt tokens were served beyond what comes again: "
            "recomputed after a preemption, or cached before this load"
        )
    if use.below_blocks is not None and use.below_blocks >= PREFIX_LEAST_SHARE:
        notes.append(
            f"smaller blocks could serve {use.below_blocks:.0%} more: prefixes are shared that "
            "end within a block"
        )
    return tuple(notes)


def work_text(work: Work) -> str:
    """What a step of a roofline holds."""
    decoded = f"{digits(work.sequences)} sequences of {digits(work.context_tokens)} tokens"
    if work.kind == "decode":
        return decoded
    prompts = f"{digits(work.prompt_tokens)} prompt tokens"
    return f"{prompts} at once" if work.kind == "prefill" else f"{decoded}, {prompts}"


def rate_text(value: float, unit: str) -> str:
    """A rate with a decimal prefix: 1.2 Tflop/s, 58 GB/s."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{digits(value / factor)} {prefix}{unit}"
    return f"{digits(value)} {unit}"


def _flops(model: str | None) -> TokenFlops | None:
    if model is None:
        return None
    try:
        config, _ = load_config(Path(model).expanduser())
    except BadInput:
        return None
    return token_flops_of(config)
