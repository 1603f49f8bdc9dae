"""What every reason code means and what to do about it: one paragraph each, for the report."""

from __future__ import annotations

CODES: dict[str, str] = {
    # --- what the test over seeds said ---
    "NONINFERIOR": (
        "On every endpoint the upper end of the interval lies below the margin: the candidate was "
        "shown to be worse than FP32 by less than the margin, if at all. Nothing to do."
    ),
    "INFERIOR_TRAIN": (
        "The lower end of the interval of the training-loss difference lies above the margin: the "
        "candidate trains worse than FP32 on the same batches, by more than is tolerated. Look at "
        "the diagnostics for the cause and at the fallback that the recommendation names."
    ),
    "INFERIOR_HELDOUT": (
        "The lower end of the interval of the held-out difference lies above the margin: the "
        "weights that the candidate reached are worse than FP32's even when evaluated in FP32. "
        "Look at the diagnostics and at the fallback that the recommendation names."
    ),
    "CI_SPANS_MARGIN": (
        "The interval contains the margin: these seeds do not tell harm from seed luck. Add the "
        "seeds that the forecast names. The looks of the default plan share the 5 % between them; "
        "seeds added after a fixed plan's only look cost some certainty: two looks at 5 % err in "
        "at most 10 % of cases."
    ),
    "TOO_FEW_SEEDS": (
        "With one or two pairs only gross failures can be seen; the test needs at least three "
        "seeds. Run the command given, which reuses the finished runs."
    ),
    "UNRESOLVABLE_AT_NMAX": (
        "At the present mean and spread no number of seeds up to the limit should settle the "
        "verdict. Use a larger held-out set, a longer run, a calmer learning rate, or state a "
        "wider margin of your own (decision.margin)."
    ),
    "HOLM_NOT_MET": (
        "Each verdict is tested at a level of its own. Adjusted for the number of candidates "
        "(Holm) this acceptance would not hold. It is a warning unless decision.familywise=true "
        "makes it bind; more seeds resolve it."
    ),
    "RIVAL_RULE": (
        "decision.method names a rule that others use, and this is what it says of these runs: the "
        "number it compares and its limit. It was not calibrated here; use it to compare, and "
        "decide with decision.method=non_inferiority."
    ),
    "METHOD_NOT_CALIBRATED": (
        "The verdicts here come from another rule than this harness' own. Its rates of wrong "
        "verdicts on planted faults and harmless formats are in docs/calibration.md."
    ),
    # --- gates: the comparison cannot judge ---
    "PAIRING_BROKEN": (
        "The two runs did not have the same initial weights, batches, dropout masks or held-out "
        "set, so their difference says nothing about precision. Draw every random number of "
        "build_model, batches and held_out from a generator seeded with `seed` (for example "
        "torch.Generator().manual_seed(seed)), and let the forward pass draw from torch alone."
    ),
    "REFERENCE_UNSTABLE": (
        "FP32 itself became non-finite or diverged in more than a third of the seeds. That is no "
        "question of precision: lower the learning rate, clip gradients or check the data first."
    ),
    "REFERENCE_NOT_LEARNING": (
        "FP32 learned too little over this run for any harm to show: the loss hardly fell, or not "
        "beyond its seed-to-seed noise. Train for more steps or raise the learning rate."
    ),
    "LOSS_LOGGED_LOW_PRECISION": (
        "Every training loss is exactly a 16-bit value, so it was computed or returned in 16 bits "
        "and small differences are rounded away. Compute the loss in FP32 inside loss_fn "
        "(logits.float()). With a held-out set the verdict rests on that set alone, and the "
        "training loss has no estimate."
    ),
    "RUN_MISSING": (
        "A run of this policy has not finished, for example because the sweep was interrupted. The "
        "same command again trains exactly what is missing."
    ),
    # --- gates: the candidate failed ---
    "CRASHED": (
        "The candidate raised an exception while FP32 trained on the same data: this model does "
        "not run under this policy. The message names the module if it is known; keep it in FP32 "
        "(policy.fp32_modules) or make it accept low-precision inputs. The traceback is in the "
        "run's record."
    ),
    "NOT_EXPRESSIBLE": (
        "The policy asks for something torch cannot do for this model, such as loss scaling with "
        "complex gradients or with an optimizer that needs a closure. Choose another policy."
    ),
    "NONFINITE": (
        "A loss, weight, buffer or held-out figure became NaN or infinite although the paired FP32 "
        "run stayed finite; without a loss scaler a non-finite gradient counts too. One such seed "
        "is enough. In FP16 the usual cause is overflow above 65504: use BF16 or keep the "
        "overflowing module in FP32."
    ),
    "LOSS_SCALE_COLLAPSE": (
        "The dynamic loss scale fell below 1 or the scaler skipped many steps in a row: gradients "
        "overflow at any scale, or an activation does. Use BF16 or keep the overflowing module in "
        "FP32."
    ),
    "DIVERGED": (
        "The smoothed training loss went back up and stayed there, or the run ended itself as "
        "diverged, while FP32's did not."
    ),
    "GROSS_DEGRADATION": (
        "Every seed is worse than FP32 by several margins: no spread over seeds explains that, so "
        "the candidate is rejected even if seeds differ too much for the test. Look at the "
        "diagnostics for the cause. Where FP32's loss ends near zero the margin is a share of that "
        "small loss, so several margins may be little beside what was learned: state a margin of "
        "your own there (decision.margin)."
    ),
    # --- warnings from the loss ---
    "IDENTICAL_TO_FP32": (
        "All losses are bitwise those of FP32. Either every op of the model stays in FP32 under "
        "this policy or the policy did not take effect; see the formats in which ops really ran. "
        "An acceptance then says nothing about the format."
    ),
    "INTERMITTENT": (
        "A run that diverged was repeated with the same seed and then finished. A policy that "
        "fails sometimes fails, so the verdict stands; expect the rate of such failures to be too "
        "small for a few seeds to measure."
    ),
    "STEP0_LOSS_DIFFERS": (
        "The first loss, on equal weights and data, already differs from FP32's by more than "
        "rounding usually does. The forward pass loses information: large integers or timesteps "
        "rounded, cancellation in distances, normalization of large values. Keep that part in FP32."
    ),
    "TREND_WORSENING": (
        "The training-loss difference grows over the last half of the run and would leave the "
        "margin in a run twice as long. Train longer before trusting an acceptance."
    ),
    "SPIKES_EXCESS": (
        "The candidate's loss spikes clearly more often than FP32's. Spikes that recover are "
        "averaged away in a short run and may not recover in a long one."
    ),
    "FP16_SKIPS_EXCESS": (
        "The loss scaler skipped more than a few steps after its calibration. Each is a lost "
        "update; the loss difference includes their cost. Lower the initial scale or use BF16."
    ),
    "BETTER_THAN_REFERENCE": (
        "The candidate is better than FP32 by more than the margin. Rounding does not teach: "
        "suspect skipped steps, rounding that acts as a regularizer, or a fault in the comparison."
    ),
    "ENDPOINTS_DISAGREE": (
        "Training loss and held-out loss point in opposite directions. Biased rounding can do "
        "that; trust the worse of the two."
    ),
    "CHAOS_SATURATED": (
        "The paired difference spreads over seeds as much as unrelated FP32 runs do: training is "
        "chaotic at this learning rate and pairing no longer narrows the interval. This is not "
        "harm. A calmer learning rate or a decay inside the run helps."
    ),
    # --- warnings from the diagnostics ---
    "ZERO_GRADIENTS": (
        "Many more gradient elements are exactly zero than under FP32. Either gradients underflow "
        "(use loss scaling or BF16) or a layer went dead after an overflow in its normalization "
        "(keep it in FP32)."
    ),
    "WEIGHTS_NOT_MOVING": (
        "Many weights ended exactly where they started although FP32 moved them: updates round "
        "away, or there are no gradients. Keep the weights in FP32, or use loss scaling."
    ),
    "LOST_UPDATES": (
        "A large share of the weight updates is smaller than half the spacing of the "
        "low-precision weights and rounds away. Keep the weights in FP32 (autocast does) or use "
        "stochastic rounding."
    ),
    "NONFINITE_BUFFERS": (
        "Buffers such as BatchNorm's running statistics ended NaN or infinite: a loss scaler skips "
        "the step but not what the forward pass wrote. Evaluation uses these buffers. Keep the "
        "module in FP32."
    ),
    "GRAD_NORM_RATIO": (
        "Towards the end of the run the gradient norm, before clipping, is far from FP32's: "
        "clipping then acts differently, or part of the gradient is missing. Evidence, not harm."
    ),
    "UNDERFLOW_OBSERVED": (
        "A notable share of the gradient elements that FP32 sees lies below the candidate's range, "
        "and no loss scaling lifts them into it. Use loss scaling or BF16."
    ),
    # --- warnings that name a module ---
    "TRIAGE": (
        "Where the trouble began: the run was replayed up to the first value that was not finite, "
        "exploded or went silent, and its place is named. Act there first."
    ),
    "NONFINITE_INSIDE": (
        "An op inside the module overflows though what goes in is finite; what follows may turn "
        "the infinity into a silent zero, so the loss need not show it. Keep the module in FP32."
    ),
    "ZERO_OUTPUTS": (
        "The module puts out zeros only, which it does not under FP32: an overflow or underflow "
        "inside it silences everything below. Keep it in FP32; no NaN is not no fault."
    ),
    "DEAD_GRADIENTS": (
        "No gradient reaches these modules although FP32's do get one: they do not learn. Look at "
        "the module that follows the last of them, or use loss scaling if all are concerned."
    ),
    "MODULE_ERROR": (
        "Given FP32's own input, this module's output is off far more than the other modules': "
        "its arithmetic cancels (differences of large numbers, distances by expansion, variances) "
        "or leaves the format's range. Keep it in FP32 (policy.fp32_modules)."
    ),
    "INTEGERS_ROUNDED": (
        "Whole numbers such as timesteps, positions or indices are carried in a format that does "
        "not hold them exactly, so neighbours become one before the module sees them. Keep them in "
        "FP32 where they are cast; keeping the module that receives them in FP32 is too late."
    ),
    "UPDATE_RATIO": (
        "The steps that are taken, relative to the weights, are far from FP32's. A factor like the "
        "loss scale means that gradients were clipped or stepped before they were unscaled."
    ),
    "ATTENTION_LOGITS": (
        "Attention logits grow well beyond FP32's, or near the end of the format: a known "
        "forerunner of divergence. Keep the attention scores in FP32, or normalize queries and "
        "keys."
    ),
    "LOSS_SCALE_OUTSIDE_WINDOW": (
        "At most of the steps that were looked at, the loss scale lay outside the window in which "
        "nothing overflows and (almost) nothing is flushed to zero. Set a scale inside the window, "
        "or use a dynamic scaler or BF16."
    ),
    # --- the same-point probe: candidate and FP32 gradients at equal weights ---
    "PROBE_STAGNATION": (
        "From the same weights and state, one optimizer step stores less of FP32's update than is "
        "tolerated: small updates round away in the weights, first at low learning rates, which a "
        "short run may not reach. An acceptance is therefore undecided, and more seeds do not "
        "change that. Keep FP32 master weights or round the weights stochastically."
    ),
    "PROBE_ROUNDING_NOISE": (
        "At equal weights the rounding error of the gradient is not small beside minibatch noise: "
        "training acts as with a smaller batch. An acceptance is therefore undecided. Keep the "
        "modules with the largest share in FP32, or use a wider format."
    ),
    "PROBE_ROUNDING_BIAS": (
        "At equal weights the rounding error has the same direction in every batch, so it does not "
        "average out and builds up over steps that a short run does not have. An acceptance is "
        "therefore undecided. Keep the module that causes it in FP32."
    ),
    "PROBE_DESCENT_LOSS": (
        "At equal weights the candidate's gradient descends noticeably slower, or faster, than "
        "FP32's: part of the gradient is missing, mostly by underflow, or is amplified. An "
        "acceptance is therefore undecided. Use loss scaling, BF16, or keep the module in FP32."
    ),
    "PROBE_WEAK_SIGNAL": (
        "At the probe's points the mean gradient drowns in minibatch noise, as near the end of "
        "training. The bias is then relative to that noise and the descent is not tested. More "
        "batches (probes.gradient_error.batches) resolve it."
    ),
    # --- caveats on one candidate ---
    "PROBE_MISSING": (
        "The arithmetic was not compared at equal weights, so slow harm (updates that stop moving "
        "weights, biased rounding) that a few hundred steps of loss cannot show is not excluded. A "
        "policy whose weights are not FP32 is therefore not recommended. The probe is "
        "probes.gradient_error."
    ),
    "FAILURE_RATE_BOUND": (
        "Zero failures in n seeds leave a failure rate of up to 1 - 0.05^(1/n) possible: 63 % at "
        "3 seeds, 45 % at 5, 31 % at 8. Rare blow-ups need many runs, or a long one, to be seen."
    ),
    "EMULATED": (
        "The format was imitated by rounding values in FP32 storage. Verdicts on the loss carry "
        "over as far as the emulation goes; speed and memory do not exist."
    ),
    "CONTROL": (
        "FP32 trained from weights moved by a relative 2^-8, the size of a BF16 rounding. Its "
        "difference from FP32 pictures harmless spread. It is drawn, never judged and never chosen."
    ),
    # --- on the whole model ---
    "USER_MARGIN": (
        "The margin is the user's (decision.margin) and not the formula's, wherever its unit fits: "
        "a number is in the unit of the loss, a percentage is of what FP32 learned, and a number "
        "followed by `own` is in the unit of the workload's own held-out figure. Every verdict is "
        "relative to it."
    ),
    "HELDOUT_MISSING": (
        "The workload has no held-out set, so the verdicts rest on the training loss alone; some "
        "faults (truncating arithmetic) lower the training loss and raise the held-out one. Define "
        "held_out(seed) or eval_fn(model)."
    ),
    "HELDOUT_SMALL": (
        "The held-out set is small, so its loss is a noisy endpoint. Use more items if there are "
        "any."
    ),
    "LOSS_NEAR_ZERO": (
        "FP32's loss ends near zero compared with what it learned. A share of that loss is a tiny "
        "margin, which then rests on seed luck. Use label smoothing or a harder set."
    ),
    "TAIL_SHORT": (
        "The run is so short that the endpoints average few steps; they are noisy. Train for more "
        "steps."
    ),
    "REFERENCE_NOT_FP32": (
        "Ops of the FP32 runs computed in FP16 or BF16, because the model's own code casts to them "
        "or enters autocast itself. Every comparison is with that reference. Take the casts out of "
        "the model and leave the precision to the policies."
    ),
    "LR_FLOOR_NOT_TESTED": (
        "The learning rate hardly decayed inside the run. Low-precision weights stall first at low "
        "rates, so include the decay to the final rate in the schedule of the tested run."
    ),
    "CHAOTIC_MODEL": (
        "Even FP32 from minimally moved weights ends several margins away: differences of that "
        "size mean nothing for this model at this length. Lower the learning rate, train longer or "
        "use more seeds."
    ),
    "SEEDS_DROPPED": (
        "FP32 failed in some seeds, but in no more than a third of them; these seeds are left out "
        "for every candidate alike."
    ),
}
"""Code -> meaning and advice."""
