"""A labelled suite for verdicts and forecasts, on real vLLM servers.

Every regime is built so that its bottleneck is known. Its baseline is profiled as `kvtune profile`
does it; then its load is sent again, in turns, to the baseline and to arms that each change one
thing: the lever that the truth names, which must help (or hurt, the other way), and others, which
must not. What the profile forecast for the levers of the engine is held against that.

    python benchmarks/verdicts.py --model .model/SmolLM2-135M-Instruct --output verdicts.json
    python benchmarks/verdicts.py --from verdicts.json --markdown docs/verdicts.md

    python benchmarks/verdicts.py --model ... --layers 8 --output plugin_effects.json \\
        --regimes plugin-bandwidth,plugin-capacity,plugin-neither

The last ones are for policies of kvtune's plugin, on part of the model and only where named.
The results are written after every regime, and regimes that are in the file already are left out.
Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from plugin_regimes import plugin_regimes
from verdict_models import cut_model, make_model
from verdict_parts import Regime
from verdict_regimes import regimes
from verdict_report import render
from verdict_results import RegimeResult, Results
from verdict_run import Bench, run_regime

import kvtune
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.errors import KvtuneError
from kvtune.kernels.ceilings import measure_ceilings
from kvtune.kernels.device import detect_device


def main() -> None:
    options = _options()
    if options.known is not None:
        results = Results.model_validate_json(options.known.read_text())
    else:
        results = _run(options)
    text = render(results)
    if options.markdown is not None:
        options.markdown.write_text(text)
    else:
        print(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="the checkpoint of SmolLM2-135M-Instruct")
    parser.add_argument("--regimes", help="names with commas between; all by default")
    parser.add_argument("--layers", type=int, help="the first so many of the model's layers")
    parser.add_argument("--rounds", type=int, default=3, help="of the baseline and every arm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("verdicts.json"))
    parser.add_argument("--markdown", type=Path, help="default: standard output")
    parser.add_argument(
        "--from", dest="known", type=Path, help="measure nothing: render these results"
    )
    options = parser.parse_args()
    if options.known is None and options.model is None:
        parser.error("--model or --from is needed")
    return options


def _run(options: argparse.Namespace) -> Results:
    chosen = _chosen(options.regimes)
    with tempfile.TemporaryDirectory() as folder, VllmEngine() as engine:
        results = _started(options, engine)
        real = options.model.resolve()
        if options.layers is not None:
            real = cut_model(real, options.layers, Path(folder))
        models = {"smollm2": real}
        done = {result.name for result in results.regimes if not result.problem}
        for regime in chosen:
            if regime.name in done:
                continue
            wanted = (regime.model, *(arm.model or regime.model for arm in regime.arms))
            for name in set(wanted) - set(models):
                models[name] = make_model(name, options.model, Path(folder))
            bench = Bench(
                engine=engine,
                device=results.device,
                ceilings=results.ceilings,
                models=models,
                logs=Path(folder),
                rounds=options.rounds,
                seed=options.seed,
            )
            results = _with(results, _measured(regime, bench))
            options.output.write_text(results.model_dump_json(indent=1) + "\n")
    return results


def _chosen(names: str | None) -> list[Regime]:
    known = {regime.name: regime for regime in (*regimes(), *plugin_regimes())}
    wanted = [one.name for one in regimes()] if names is None else names.split(",")
    if missing := [name for name in wanted if name not in known]:
        raise SystemExit(f"no regime {missing[0]}; there are {', '.join(known)}")
    return [known[name] for name in wanted]


def _started(options: argparse.Namespace, engine: VllmEngine) -> Results:
    """The results so far, or none yet with the ceilings of this machine."""
    if options.output.exists():
        return Results.model_validate_json(options.output.read_text())
    device = detect_device()
    return Results(
        device=device,
        ceilings=measure_ceilings(device),
        engine=engine.describe().model_copy(update={"python": None}),
        kvtune=kvtune.__version__,
        model=options.model.name,
        rounds=options.rounds,
        seed=options.seed,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _measured(regime: Regime, bench: Bench) -> RegimeResult:
    try:
        return run_regime(regime, bench)
    except KvtuneError as error:
        print(f"{regime.name}: {error.message}", file=sys.stderr)
        return RegimeResult(
            name=regime.name,
            truth=regime.truth,
            built=regime.built,
            goal=regime.goal,
            arguments={name: str(value) for name, value in regime.arguments.items()},
            problem=error.message,
        )


def _with(results: Results, found: RegimeResult) -> Results:
    others = [result for result in results.regimes if result.name != found.name]
    return results.model_copy(update={"regimes": (*others, found)})


if __name__ == "__main__":
    main()
