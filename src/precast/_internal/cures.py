"""The texts of all advice in traces, reports, runs, and errors of scalers, policies, shipping and optim.

Invariant: each piece has a test with the mark `trial(NAME)`, which follows the advice on a program with the fault and
checks the result (`tests/project/test_cures.py`).
"""

from __future__ import annotations

from typing import Final

__all__ = ["Cure"]


class Cure(str):
    """One piece of advice, with fields for `str.format`."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """The advice without its fields filled in."""
        return str(self)

    def __call__(self, **values: object) -> str:
        """Return the text with its fields filled in."""
        return self.format(**values)


# --- the gradient scaler's errors and diagnoses ---

UPDATE_MISSING: Final = Cure(
    "Backward ran between the two calls. If that was the next iteration, call update() at the end of each iteration, "
    "also of one whose step you skip by hand. If it accumulates gradients, call unscale_() once, after the last "
    "backward()."
)
UNSCALE_ONCE: Final = Cure("Call it once, after the last backward() and before step().")
UNSCALE_BEFORE_STEP: Final = Cure(
    "Call unscale_() before step(), and update() at the end of the iteration."
)
UPDATE_ONCE: Final = Cure(
    "call update() once, at the end of each iteration, after the steps of all optimizers."
)
UPDATE_FIRST: Final = Cure("call update() first, which ends the iteration.")
CLIP_IN_CLOSURE: Final = Cure(
    "Leave unscale_() out; clip inside the closure on scaled gradients, with max_norm times scaler.get_scale()."
)
UNSCALE_LAST: Final = Cure(
    "Call unscale_() after the last backward(). After an iteration without update() (a step skipped by hand, an "
    "exception, Ctrl-C) call optimizer.zero_grad() and scaler.update(), then begin the next one."
)
BROKEN_PARAMETERS: Final = Cure(
    "Load a checkpoint from before; then look at the learning rate, and at what writes to the parameters."
)
BROKEN_BUFFERS: Final = Cure(
    "A skipped step leaves parameters alone, but forward had written the buffers. Load a checkpoint from before, and "
    "have the scaler put back what a skipped iteration writes: GradScaler(..., restore_buffers=model)."
)
BAD_LOSSES: Final = Cure(
    "Look at the batches, at the learning rate, and at log, sqrt and division in the loss."
)
STUCK_SCALE: Final = Cure(
    "Look at NaN in these gradients, and at the learning rate. If gradients this large are meant, lower min_scale or "
    "let the scale fall."
)
MANY_SKIPS: Final = Cure(
    "Look at NaN in these parameters or in the data; raise the limit, or begin with a lower init_scale, if the scale "
    "simply takes this long to fall."
)
FLOAT32_PARAMETERS: Final = Cure(
    "Keep parameters in float32 (model.float()), and let autocast lower the computation."
)

# --- what a report says of numbers ---

MODULE_IN_FLOAT32: Final = Cure(
    "Run {modules} in float32. This helps if its results are small enough for what follows; if they are not, run the "
    "whole program in bfloat16 (`dtype=torch.bfloat16`), which has float32's range.{more}"
)
CODE_IN_FLOAT32: Final = Cure(
    "Compute these lines in float32: put them into `with precast.disable():` and call `.float()` on what they are "
    "given; or run the whole program in bfloat16 (`dtype=torch.bfloat16`), which has float32's range.{more}"
)
OWN_CAST: Final = Cure(
    " A cast that the program itself makes to float16 by name, as `.half()`, has to go from the code: no policy and "
    "no region changes it."
)
NAN_IN_FLOAT32: Final = Cure(
    " If it is NaN there too, the format is not the reason: look at what it divides by."
)
IN_BFLOAT16: Final = Cure("Run in bfloat16 (`dtype=torch.bfloat16`), which has float32's range.")
STORE_IN_BFLOAT16: Final = Cure(
    "Store the model in bfloat16 or in float32, and run in bfloat16 (`dtype=torch.bfloat16`), which has float32's "
    "range: the weights of {module} are stored in float16."
)
SMALL_EPS: Final = Cure(
    "Keep the parameters in float32, without `.half()` or `dtype=torch.float16`, and let the region lower the "
    "computation: in float16 `eps={eps:g}` is 0, so {optimizer} divides by zero."
)
BAD_STEP: Final = Cure(
    "Look at the step before, not at `{module}`: at the learning rate, and at gradients that were not finite and not "
    "skipped. Begin again with parameters from before."
)
BAD_BUFFER: Final = Cure(
    "Let forward write to `{tensor}` only what is finite, and begin again with the buffer from before: a skipped step "
    "leaves parameters alone, but forward had written the buffer."
)
LEAVE_IT: Final = Cure(
    "Leave it: a growing scale finds its limit by a skipped step, and the steps after it were taken."
)
FIND_SCALE: Final = Cure(
    'Let the scaler find the scale, `precast.GradScaler(device, init_scale="auto")`. If steps are still skipped, look '
    "at the gradients of {module}."
)
LOW_SCALE: Final = Cure(
    "Look at the gradients of {module}: the scale is {scale:g}, so they are not finite without it either."
)
BAD_LOSS: Final = Cure(
    "Look at the code of the loss, at log, sqrt and division in it: the loss itself is infinite or NaN, and the output "
    "of the model is finite."
)
BEYOND_FLOAT32: Final = Cure(
    "{module} leaves float32's range, or has no value: look at its inputs, at the learning rate, and at what it "
    "divides by."
)
LINES_BEYOND_FLOAT32: Final = Cure(
    "Look at what these lines divide by, and at how large their numbers grow."
)
LOOK_BEFORE: Final = Cure("Look at the code {place}")
LOOK_AT_DATA: Final = Cure("Look at the data that the model is given.")
SCALE_THE_LOSS: Final = Cure(
    "Scale the loss: `scaler = precast.GradScaler(device)`, then `scaler.scale(loss).backward()`, "
    "`scaler.step(optimizer)`, `scaler.update()`; or run in bfloat16, which has float32's range."
)
RAISE_THE_SCALE: Final = Cure(
    'The scale is too low for them: let the scaler find it, `precast.GradScaler(device, init_scale="auto")`, or run '
    "in bfloat16, which has float32's range."
)
KEEP_MASTERS: Final = Cure("Keep float32 masters: train a float32 model in a region.")
LEARN_IN_16_BITS: Final = Cure(
    " Or let it learn in 16 bits: `precast.optim.bfloat16_weights(model, optimizer)`, with which {share} "
    "of the updates in the same steps would have rounded to nothing."
)
KEEP_STATES: Final = Cure(
    "Keep the optimizer's states in float32: train a float32 model in a region."
)
KEEP_AVERAGE: Final = Cure(
    "Keep the average in float32, and cast a copy where 16 bits are needed: "
    "`average = copy.deepcopy(model).float()`."
)
BROKEN_AT_THE_END: Final = Cure(
    "Load a checkpoint from before; then look at the learning rate, and at what writes to the parameters."
)
RESTORE_BUFFERS: Final = Cure(
    "Load a checkpoint from before, and have the scaler put buffers back when it skips a step: "
    "`precast.GradScaler(device, restore_buffers=model)`."
)
FASTER_DTYPE: Final = Cure("Use {instead} on this machine instead of {dtype}.")

# --- what a report says to do first, where nothing is known to be wrong ---

WATCH_NUMBERS: Final = Cure(
    "Run it once more with `--health`: the report then names what {happens} first."
)
COMPARE_TIMES: Final = Cure(
    "Compare its time with float32's (`enabled=False` in the region), and with that of weights which are held between "
    "regions: `precast.attach(model)`."
)
START_FROM_A_BASE: Final = Cure(
    "If this is not what you want, look at the policy: operations with the rule `lower` run in 16 bits, and a policy "
    'file without `base = "default"` has no rules but its own.'
)
OPEN_A_REGION: Final = Cure(
    'Compute the forward pass and the loss inside `with precast.autocast("{device}"):`, and run backward outside. '
    "Then compare time and memory with and without it: one run does not tell."
)

# --- what a run sees in the order of a training step ---

UNSCALE_BEFORE_CLIPPING: Final = Cure(
    "Call `scaler.unscale_(optimizer)` once after the last backward and before clipping. Without it, a limit of "
    "{limit} acts as {acts_as}, and changes with the scale."
)
BACKWARD_OUTSIDE: Final = Cure(
    "End the region before `backward()`. Inside it, autocast also casts operations of the backward pass: gradients of "
    "what forward computed in float32 on purpose may be computed in 16 bits."
)
DEFAULT_POLICY: Final = Cure(
    "the operation that failed runs with --policy default: it was tried on the same arguments"
)

# --- findings of a trace ---

DROP_THE_CAST: Final = Cure(
    "Take the cast to float32{place} away: the values are {dtype}, and become {dtype} again."
)
KEEP_THE_DTYPE: Final = Cure(
    "{op} only moves numbers: keep it in {dtype}, by the rule keep in a policy file."
)
LOWER_THE_ISLAND: Final = Cure(
    "If the results stay good enough, run {op} in 16 bits on {device}, by the rule lower in a policy file: in forward "
    "that saved {saved} a call when it was tried."
)
HOLD_THE_WEIGHTS: Final = Cure(
    "Hold the weights, so that they are cast once a step: precast.attach(model)."
)
ONE_REGION: Final = Cure(
    "Open one region around all of them, with its cache on: casts are kept until the outermost region ends."
)
REGION_AROUND: Final = Cure(
    'Open the region around it, too: with precast.autocast("{device}"): ... In forward that saved {saved} a call when '
    "it was tried."
)
RULE_FOR_IT: Final = Cure(
    "Have {op} run in 16 bits on {device}, by the rule lower in a policy file: in forward that saved {saved} a call "
    "when it was tried."
)
WHOLE_NUMBERS: Final = Cure(
    "Compute {op} in float32 there: {rule}`with precast.disable():` around the lines. Positions and time steps above "
    "256 (2048 in float16) are not all whole numbers of 16 bits."
)

LIMIT_IN_FLOAT32: Final = Cure(
    "Call {op}, and what computes with its result, on float32 values (`x.float()`): log(0), log(1 - 1) and a division "
    "by 0 give infinity or NaN."
)

# --- what a trace adds to an error about dtypes ---

PROMOTE_ROW: Final = Cure("  To mend it, save this as a policy file, and name it as the policy:")
CALL_IN_REGION: Final = Cure(
    '  Autocast is off here. To mend it, run it in a region: with precast.autocast("{device}"): ...'
)
CAST_BEFORE: Final = Cure("  To mend it, cast its tensors to {dtype} before the call.")

# --- errors of convert, load and export ---

CONVERT_EVAL: Final = Cure("Call model.eval() first.")
CONVERT_FLOAT32: Final = Cure("Convert the float32 model.")
CONVERT_UNSCRIPTED: Final = Cure("Convert the model that was scripted.")
CONVERT_INSIDE: Final = Cure("Convert the model inside, then wrap or compile that.")
CONVERT_META: Final = Cure("Load them first; precast.load_converted does both.")
CONVERT_DEVICE: Final = Cure(
    "Move the model to a device that the policy has rules for, or give the policy rules for this one."
)
CONVERT_IN_PLACE: Final = Cure("Convert it in place: convert(model, ..., in_place=True).")
CONVERT_ARGUMENTS: Final = Cure(
    "Pass the arguments of one call: a tensor, a tuple of positional arguments, or a dict of keyword arguments; a list "
    "has one of these for each call."
)
CONVERT_PATH: Final = Cure(
    "Convert the model again, with an example that takes this path: convert(model, ..., example=[one, another])."
)
CONVERT_FUNC: Final = Cure("Transform the float32 model in a region.")
CONVERT_INFERENCE: Final = Cure(
    "Call model.eval(), or train the float32 model and convert it again."
)
CONVERT_TRACE: Final = Cure(
    "Record it with torch.jit.trace(model, example), or write a program with precast.export."
)
LOAD_FUNCTION: Final = Cure(
    "Pass load_converted the function that creates the model instead of a model on the meta device: it creates such "
    "buffers with their values."
)
LOAD_EXAMPLE: Final = Cure(
    "Pass an example of a call, to observe the dtypes in which the policy uses the weights: "
    "load_converted(..., example=...)."
)
EXPORT_UNSCRIPTED: Final = Cure("export the module that was scripted")
EXPORT_TUPLE: Final = Cure("a single argument is written `(x,)`")
EXPORT_RETARGET: Final = Cure(
    'Move the model, or apply the rules of another device: policy.retarget("{device}", like="{like}")'
)
EXPORT_COND: Final = Cure("write it with torch.cond, or make the decision outside of the model.")
EXPORT_DETACH: Final = Cure("Write `.detach()` instead.")
EXPORT_RULE: Final = Cure(
    'Give it a rule, as in policy.replace(ops={{"{name}": "fp32"}}), or call it outside of regions'
)

# --- weights that are stored in bfloat16 ---

BFLOAT16_BEFORE_DDP: Final = Cure("Call bfloat16_weights first, then wrap the model.")
BFLOAT16_DENSE: Final = Cure(
    "remove sparse=True from nn.Embedding, or give that module's weight another optimizer."
)

ACCUMULATE_UNDER_FSDP: Final = Cure(
    "Let FSDP do it in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32), and "
    "model.set_requires_gradient_sync(False) in all passes but the last."
)

# --- rules for modules ---

EXACT_RULE: Final = Cure(
    "Add a rule for {name} itself, which decides, or make one of the patterns narrower."
)
ONE_RULE: Final = Cure("Write one rule, or the same for both names.")
WHOLE_ATTENTION: Final = Cure("Write a rule for the attention as a whole.")
LOWER_AGAIN: Final = Cure(
    'To switch it on again, write {{ dtype = "lower", ops = {{ linear = "{rule}" }} }}.'
)
WHOLE_SCRIPTED: Final = Cure("Write a rule for {name} as a whole, and none for the modules in it.")
