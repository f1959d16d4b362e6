"""CPU time of a large plan: 1,000 servers, 10,000 episodes in flight, 100 train steps, on one core.

    python benchmark/planner_scale.py [--servers 1000] [--batch 2500] [--staleness 3] [--answers 2] [--steps 100]

Prints one line of JSON: seconds of CPU and of the clock, simulated hours, and the mean staleness.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal.api.config import GRPOConfig, InferenceEngineConfig, TrainDatasetConfig  # noqa: E402
from areal.api.config.experiment import LengthRule  # noqa: E402
from areal.observe.log import get_logger  # noqa: E402
from areal.planner.service import ServerTimes, ServiceTimes, TrainerTimes, Workload  # noqa: E402
from areal.planner.simulation import Setting, coarse, simulate  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"servers": 1000, "batch": 2500, "staleness": 3, "answers": 2, "steps": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    get_logger("areal").setLevel("ERROR")
    config = GRPOConfig(
        experiment_name="planner",
        trial_name="scale",
        allocation_mode=f"native:d{args.servers}+fsdp:d8",
        train_dataset=TrainDatasetConfig(path="none", batch_size=args.batch),
        rollout=InferenceEngineConfig(max_head_offpolicyness=args.staleness),
    )
    server = ServerTimes(step_s=0.01, sequence_s=1e-4, context_s=1e-8, prefill_s=1e-5, prepare_s=5.0, install_s=0.2)
    times = ServiceTimes(server=server, trainer=TrainerTimes(before_s=5.0, update_s=30.0, publish_s=2.0))
    work = Workload(prompt=512, answers=args.answers, rule=LengthRule.parse("lognormal(4000,0.8,16000)"))
    # All of it: `areal plan` simulates a part.
    setting = coarse(Setting(config=config, times=times, work=work, steps=args.steps))
    began_s, used_s = time.perf_counter(), time.process_time()
    outcome = simulate(setting)
    print(
        json.dumps(
            {
                "cpu_s": round(time.process_time() - used_s, 1),
                "seconds": round(time.perf_counter() - began_s, 1),
                "in_flight": config.max_concurrent_rollouts,
                "episodes": args.batch * args.steps,
                "tokens_for_each_simulated": setting.unit,
                "simulated_hours": round(outcome.steps[-1].end_s / 3600, 2),
                "staleness_mean": round(fmean(step.staleness for step in outcome.steps), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
