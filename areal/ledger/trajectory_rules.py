"""The rules of rollout.check_trajectory_format."""

import math

from areal.api.data import Trajectory
from areal.ledger.payload import TrajectoryError


def check_trajectory(trajectory: Trajectory) -> None:
    """The additional rules of rollout.check_trajectory_format. Raises TrajectoryError for the first broken one."""
    if any(token_id < 0 for token_id in trajectory.token_ids):
        raise TrajectoryError("token_ids holds a negative id", code="workflow.wrong_type")
    mask_values = set(trajectory.loss_mask)
    problem = ""
    if not mask_values <= {0, 1}:
        problem = f"holds {sorted(mask_values)}; only 0 and 1 are allowed"
    elif 1 not in mask_values:
        problem = "marks no token to train on"
    elif trajectory.loss_mask[0]:
        problem = "marks the first token, which has no prediction"
    if problem:
        raise TrajectoryError(f"loss_mask {problem}", code="workflow.loss_mask")
    columns = zip(trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.output_versions, strict=True)
    for position, (mask, logprob, version) in enumerate(columns):
        if not math.isfinite(logprob) or logprob > 1e-3:
            problem = "which is not a log-probability"
        elif not mask and logprob != 0.0:
            problem = "but must be 0.0 where loss_mask is 0"
        if problem:
            message = f"rollout_logprobs[{position}] is {logprob}, {problem}"
            raise TrajectoryError(message, code="workflow.rollout_logprobs")
        if mask and version < 0:
            message = f"output_versions[{position}] is {version}, but loss_mask marks this token"
            raise TrajectoryError(message, code="workflow.output_versions")
