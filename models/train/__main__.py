"""`python -m models.train prepare | fit | export | quantize`: the steps that remake the demo models."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder of the corpus as tokens")
    parser.add_argument("--fitted", type=Path, default=Path("build/demo/fitted"), help="folder of the trained weights")
    steps = parser.add_subparsers(dest="step", required=True)
    prepare_step = steps.add_parser("prepare", help="read Lib/, train the tokenizer, write token arrays")
    fit_step = steps.add_parser("fit", help="train one model, on CUDA where there is one; the draft needs the target")
    fit_step.add_argument("name", choices=("demo", "demo-draft"))
    fit_step.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    export_step = steps.add_parser("export", help="measure, then write the model folders and their cards")
    quantize_step = steps.add_parser("quantize", help="write the target in four bits, and what that cost")
    for step in (prepare_step, quantize_step):
        step.add_argument("--lib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="CPython's Lib/")
    for step in (export_step, quantize_step):
        step.add_argument("--models", type=Path, default=Path("models"))
    options = parser.parse_args()
    if options.step == "prepare":
        from models.train.prepare import prepare

        print(prepare(options.lib, options.work))
    elif options.step == "fit":
        from models.train import run

        recipe = run.RECIPES[options.name]
        run.run(options.name, run.tiny(recipe) if options.tiny else recipe, options.work, options.fitted)
    elif options.step == "quantize":
        from models.train.awq import write_awq

        write_awq(options.lib, options.work, options.models)
    else:
        from models.train.card import write_models

        write_models(options.work, options.fitted, options.models)


if __name__ == "__main__":
    main()
