"""All advice in traces, reports, runs, and errors of scalers, policies, shipping and optim: its condition and text.

Invariant: each piece has a test with the mark `trial(name)`, which follows the advice on a program with the fault and
checks the result (`tests/project/test_cures.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Cure"]


@dataclass(frozen=True, slots=True)
class Cure:
    """One piece of advice."""

    name: str
    """The name in the mark of its trial."""
    when: str
    """The condition of the advice."""
    text: str
    """The advice, with fields for `str.format`."""

    def __call__(self, **values: object) -> str:
        """Return the text with its fields filled in."""
        return self.text.format(**values)


# --- the gradient scaler's errors and diagnoses ---

UPDATE_MISSING: Final = Cure(
    "scaler: update is missing",
    "`unscale_` twice since the last `update`, and a backward pass between the two",
    "Backward ran between the two calls. If that was the next iteration, call update() at the end of each iteration, "
    "also of one whose step you skip by hand. If it accumulates gradients, call unscale_() once, after the last "
    "backward().",
)
UNSCALE_ONCE: Final = Cure(
    "scaler: unscale once",
    "`unscale_` twice since the last `update`, and no backward pass between the two",
    "Call it once, after the last backward() and before step().",
)
UNSCALE_BEFORE_STEP: Final = Cure(
    "scaler: unscale before step",
    "`unscale_` after `step` since the last `update`",
    "Call unscale_() before step(), and update() at the end of the iteration.",
)
UPDATE_ONCE: Final = Cure(
    "scaler: update after the steps",
    "`step` twice since the last `update`",
    "call update() once, at the end of each iteration, after the steps of all optimizers.",
)
UPDATE_FIRST: Final = Cure(
    "scaler: update before backward",
    "`backward` of a loss after `step` since the last `update`",
    "call update() first, which ends the iteration.",
)
CLIP_IN_CLOSURE: Final = Cure(
    "scaler: clip inside the closure",
    "`step` with a closure after `unscale_`",
    "Leave unscale_() out; clip inside the closure on scaled gradients, with max_norm times scaler.get_scale().",
)
UNSCALE_LAST: Final = Cure(
    "scaler: unscale after backward",
    "a backward pass between `unscale_` and `step`",
    "Call unscale_() after the last backward(). After an iteration without update() (a step skipped by hand, an "
    "exception, Ctrl-C) call optimizer.zero_grad() and scaler.update(), then begin the next one.",
)
BROKEN_PARAMETERS: Final = Cure(
    "scaler: parameters are not finite",
    "three skipped iterations whose loss was not finite, and parameters that hold infinity or NaN",
    "Load a checkpoint from before; then look at the learning rate, and at what writes to the parameters.",
)
BROKEN_BUFFERS: Final = Cure(
    "scaler: buffers are not finite",
    "three skipped iterations whose loss was not finite, and buffers of the model that hold NaN",
    "A skipped step leaves parameters alone, but forward had written the buffers. Load a checkpoint from before, and "
    "have the scaler put back what a skipped iteration writes: GradScaler(..., restore_buffers=model).",
)
BAD_LOSSES: Final = Cure(
    "scaler: the loss is not finite",
    "as many skipped iterations as are needed whose loss was not finite, with finite parameters and buffers",
    "Look at the batches, at the learning rate, and at log, sqrt and division in the loss.",
)
STUCK_SCALE: Final = Cure(
    "scaler: the scale cannot fall",
    "40 skipped iterations in which the scale did not fall",
    "Look at NaN in these gradients, and at the learning rate. If gradients this large are meant, lower min_scale or "
    "let the scale fall.",
)
MANY_SKIPS: Final = Cure(
    "scaler: the limit on skipped steps",
    "as many skipped iterations as `max_consecutive_skips` allows",
    "Look at NaN in these parameters or in the data; raise the limit, or begin with a lower init_scale, if the scale "
    "simply takes this long to fall.",
)
FLOAT32_PARAMETERS: Final = Cure(
    "scaler: keep parameters in float32",
    "`unscale_` of float16 gradients of float16 parameters",
    "Keep parameters in float32 (model.float()), and let autocast lower the computation.",
)

# --- what a report says of numbers ---

MODULE_IN_FLOAT32: Final = Cure(
    "report: run the module in float32",
    "the output of a module overflows float16, or is NaN there, and its weights are stored in float32",
    "Run {modules} in float32. This helps if its results are small enough for what follows; if they are not, run the "
    "whole program in bfloat16 (`dtype=torch.bfloat16`), which has float32's range.{more}",
)
CODE_IN_FLOAT32: Final = Cure(
    "report: compute the lines in float32",
    "code of the model itself, or of a module that is stored in 16 bits, overflows float16 between two modules",
    "Compute these lines in float32: put them into `with precast.disable():` and call `.float()` on what they are "
    "given; or run the whole program in bfloat16 (`dtype=torch.bfloat16`), which has float32's range.{more}",
)
OWN_CAST: Final = Cure(
    "report: a cast by the program",
    "the code that overflows float16 casts by itself",
    " A cast that the program itself makes to float16 by name, as `.half()`, has to go from the code: no policy and "
    "no region changes it.",
)
NAN_IN_FLOAT32: Final = Cure(
    "report: NaN in float32 too",
    "what is first is NaN in float16",
    " If it is NaN there too, the format is not the reason: look at what it divides by.",
)
IN_BFLOAT16: Final = Cure(
    "report: run in bfloat16",
    "the whole model, or a gradient without a scaler, overflows float16, with weights in float32",
    "Run in bfloat16 (`dtype=torch.bfloat16`), which has float32's range.",
)
STORE_IN_BFLOAT16: Final = Cure(
    "report: store the model in bfloat16",
    "a module whose weights are stored in float16 overflows",
    "Store the model in bfloat16 or in float32, and run in bfloat16 (`dtype=torch.bfloat16`), which has float32's "
    "range: the weights of {module} are stored in float16.",
)
SMALL_EPS: Final = Cure(
    "report: eps is zero in float16",
    "a parameter in float16 is not finite before a step, and the eps of its optimizer is 0 in float16",
    "Keep the parameters in float32, without `.half()` or `dtype=torch.float16`, and let the region lower the "
    "computation: in float16 `eps={eps:g}` is 0, so {optimizer} divides by zero.",
)
BAD_STEP: Final = Cure(
    "report: the optimizer's step",
    "a parameter is not finite before a step",
    "Look at the step before, not at `{module}`: at the learning rate, and at gradients that were not finite and not "
    "skipped. Begin again with parameters from before.",
)
BAD_BUFFER: Final = Cure(
    "report: a buffer is not finite",
    "a buffer of the module is not finite before a step",
    "Let forward write to `{tensor}` only what is finite, and begin again with the buffer from before: a skipped step "
    "leaves parameters alone, but forward had written the buffer.",
)
LEAVE_IT: Final = Cure(
    "report: leave an occasional skip",
    "at most a tenth of the steps were skipped, their losses were finite, and later steps were taken",
    "Leave it: a growing scale finds its limit by a skipped step, and the steps after it were taken.",
)
FIND_SCALE: Final = Cure(
    "report: find the scale",
    "more steps were skipped than that, the losses were finite, and the scale was above 1",
    'Let the scaler find the scale, `precast.GradScaler(device, init_scale="auto")`. If steps are still skipped, look '
    "at the gradients of {module}.",
)
LOW_SCALE: Final = Cure(
    "report: the scale is low already",
    "more steps were skipped than that, the losses were finite, and the scale was at most 1",
    "Look at the gradients of {module}: the scale is {scale:g}, so they are not finite without it either.",
)
BAD_LOSS: Final = Cure(
    "report: the loss is not finite",
    "a gradient is the first that is not finite, and the losses of such steps were not finite before they were scaled",
    "Look at the code of the loss, at log, sqrt and division in it: the loss itself is infinite or NaN, and the output "
    "of the model is finite.",
)
BEYOND_FLOAT32: Final = Cure(
    "report: beyond float32",
    "the output of a module is not finite in a format with float32's range",
    "{module} leaves float32's range, or has no value: look at its inputs, at the learning rate, and at what it "
    "divides by.",
)
LINES_BEYOND_FLOAT32: Final = Cure(
    "report: lines beyond float32",
    "code between two modules gives what is not finite in a format with float32's range",
    "Look at what these lines divide by, and at how large their numbers grow.",
)
LOOK_BEFORE: Final = Cure(
    "report: look at the code before",
    "an input that no module made is not finite, and no operation before it was traced",
    "Look at the code {place}",
)
LOOK_AT_DATA: Final = Cure(
    "report: look at the data",
    "an input of the whole model is not finite",
    "Look at the data that the model is given.",
)
SCALE_THE_LOSS: Final = Cure(
    "report: scale the loss",
    "gradients underflow, and no scaler scales the loss",
    "Scale the loss: `scaler = precast.GradScaler(device)`, then `scaler.scale(loss).backward()`, "
    "`scaler.step(optimizer)`, `scaler.update()`; or run in bfloat16, which has float32's range.",
)
RAISE_THE_SCALE: Final = Cure(
    "report: the scale is too low",
    "gradients underflow although a scaler scales the loss",
    'The scale is too low for them: let the scaler find it, `precast.GradScaler(device, init_scale="auto")`, or run '
    "in bfloat16, which has float32's range.",
)
KEEP_MASTERS: Final = Cure(
    "report: keep float32 masters",
    "most updates of a parameter in 16 bits round to nothing",
    "Keep float32 masters: train a float32 model in a region.",
)
LEARN_IN_16_BITS: Final = Cure(
    "report: learn in 16 bits",
    "most updates of a parameter in 16 bits round to nothing, and fewer would with compensated steps",
    " Or let it learn in 16 bits: `precast.optim.bfloat16_weights(model, optimizer)`, with which {share} "
    "of the updates in the same steps would have rounded to nothing.",
)
KEEP_STATES: Final = Cure(
    "report: keep states in float32",
    "the latest counted step left most values of an optimizer's state in 16 bits as they were",
    "Keep the optimizer's states in float32: train a float32 model in a region.",
)
KEEP_AVERAGE: Final = Cure(
    "report: keep the average in float32",
    "an update left most values of an average of the weights in 16 bits as they were",
    "Keep the average in float32, and cast a copy where 16 bits are needed: "
    "`average = copy.deepcopy(model).float()`.",
)
BROKEN_AT_THE_END: Final = Cure(
    "report: a parameter at the end",
    "no gradient or loss was seen that was not finite, and a parameter holds infinity or NaN at the end",
    "Load a checkpoint from before; then look at the learning rate, and at what writes to the parameters.",
)
RESTORE_BUFFERS: Final = Cure(
    "report: a buffer at the end",
    "no other number was seen that was not finite, and a buffer that was finite holds infinity or NaN at the end",
    "Load a checkpoint from before, and have the scaler put buffers back when it skips a step: "
    "`precast.GradScaler(device, restore_buffers=model)`.",
)
FASTER_DTYPE: Final = Cure(
    "report: a faster dtype",
    "rules gave 16 bits on the CPU, which multiplies matrices in that dtype slower than in float32",
    "Use {instead} on this machine instead of {dtype}.",
)

# --- what a report says to do first, where nothing is known to be wrong ---

WATCH_NUMBERS: Final = Cure(
    "report: watch the numbers",
    "steps were skipped, or losses were not finite, and numbers were not watched",
    "Run it once more with `--health`: the report then names what {happens} first.",
)
COMPARE_TIMES: Final = Cure(
    "report: compare the times",
    "casts took at least 30% of the traced time",
    "Compare its time with float32's (`enabled=False` in the region), and with that of weights which are held between "
    "regions: `precast.attach(model)`.",
)
START_FROM_A_BASE: Final = Cure(
    "report: a policy without 16 bits",
    "rules were carried out, and none gave 16 bits",
    "If this is not what you want, look at the policy: operations with the rule `lower` run in 16 bits, and a policy "
    'file without `base = "default"` has no rules but its own.',
)
OPEN_A_REGION: Final = Cure(
    "report: open a region",
    "all operations ran in float32, and no rule was carried out",
    'Compute the forward pass and the loss inside `with precast.autocast("{device}"):`, and run backward outside. '
    "Then compare time and memory with and without it: one run does not tell.",
)

# --- what a run sees in the order of a training step ---

UNSCALE_BEFORE_CLIPPING: Final = Cure(
    "run: unscale before clipping",
    "gradients are clipped after the backward pass of a scaled loss and before `unscale_`, and the limit is less than "
    "a twentieth of the scale",
    "Call `scaler.unscale_(optimizer)` once after the last backward and before clipping. Without it, a limit of "
    "{limit} acts as {acts_as}, and changes with the scale.",
)
BACKWARD_OUTSIDE: Final = Cure(
    "run: backward outside the region",
    "a backward pass begins where autocast is on for the device of the loss",
    "End the region before `backward()`. Inside it, autocast also casts operations of the backward pass: gradients of "
    "what forward computed in float32 on purpose may be computed in 16 bits.",
)
DEFAULT_POLICY: Final = Cure(
    "run: the default policy",
    "an error about dtypes ended the program in a region of PyTorch's, and the operation runs under the policy "
    "`default` when it is tried again on copies of its tensors",
    "the operation that failed runs with --policy default: it was tried on the same arguments",
)

# --- findings of a trace ---

DROP_THE_CAST: Final = Cure(
    "trace: drop the cast",
    "the program casts 16 bits to float32, and all that follows only moves the numbers, and casts them back",
    "Take the cast to float32{place} away: the values are {dtype}, and become {dtype} again.",
)
KEEP_THE_DTYPE: Final = Cure(
    "trace: keep the dtype",
    "a rule casts 16 bits to float32 for an operation that only moves numbers, at each of its calls, and all that "
    "follows casts them back; the policy is not one that tune chose",
    "{op} only moves numbers: keep it in {dtype}, by the rule keep in a policy file.",
)
LOWER_THE_ISLAND: Final = Cure(
    "trace: lower an island",
    "all results of an operation in float32 are cast to 16 bits and used in no other way, and in a trial on tensors of "
    "the same shapes, runs in 16 bits were faster; the policy is not one that tune chose",
    "If the results stay good enough, run {op} in 16 bits on {device}, by the rule lower in a policy file: in forward "
    "that saved {saved} a call when it was tried.",
)
HOLD_THE_WEIGHTS: Final = Cure(
    "trace: hold the weights",
    "a weight that an attachment holds is cast again while it stays the same",
    "Hold the weights, so that they are cast once a step: precast.attach(model).",
)
ONE_REGION: Final = Cure(
    "trace: one region",
    "a weight that an attachment does not hold is cast again in another outermost region while it stays the same",
    "Open one region around all of them, with its cache on: casts are kept until the outermost region ends.",
)
REGION_AROUND: Final = Cure(
    "trace: a region around it",
    "a product of matrices or a convolution ran in float32 outside of all regions, and in a trial on tensors of the "
    "same shapes, runs in 16 bits were faster, casts included",
    'Open the region around it, too: with precast.autocast("{device}"): ... In forward that saved {saved} a call when '
    "it was tried.",
)
RULE_FOR_IT: Final = Cure(
    "trace: a rule for it",
    "an operation that multiplies two tensors, with sums, ran in float32 in a region whose policy has no rule for it, "
    "and in a trial on tensors of the same shapes, runs in 16 bits were faster, casts included; the policy is not one "
    "that tune chose",
    "Have {op} run in 16 bits on {device}, by the rule lower in a policy file: in forward that saved {saved} a call "
    "when it was tried.",
)
WHOLE_NUMBERS: Final = Cure(
    "trace: whole numbers in float32",
    "the program makes whole numbers float32, and a rule rounds them to 16 bits, so that several become one",
    "Compute {op} in float32 there: {rule}`with precast.disable():` around the lines. Positions and time steps above "
    "256 (2048 in float16) are not all whole numbers of 16 bits.",
)

LIMIT_IN_FLOAT32: Final = Cure(
    "trace: limits in float32",
    "a limit of clamp is 0, 1 or -1 in the 16 bits of its input and another number in the code, and results reach it",
    "Call {op}, and what computes with its result, on float32 values (`x.float()`): log(0), log(1 - 1) and a division "
    "by 0 give infinity or NaN.",
)

# --- what a trace adds to an error about dtypes ---

PROMOTE_ROW: Final = Cure(
    "error: promote in a policy file",
    "the call that failed runs under the row when it is tried again on copies of its tensors",
    "  To mend it, save this as a policy file, and name it as the policy:",
)
CALL_IN_REGION: Final = Cure(
    "error: call it in a region",
    "the call that failed is in no region, and runs in one when it is tried again on copies of its tensors",
    '  Autocast is off here. To mend it, run it in a region: with precast.autocast("{device}"): ...',
)
CAST_BEFORE: Final = Cure(
    "error: cast before the call",
    "no row and no region mends the call, and it runs on copies of its tensors that were cast",
    "  To mend it, cast its tensors to {dtype} before the call.",
)

# --- errors of convert, load and export ---

CONVERT_EVAL: Final = Cure(
    "convert: evaluation mode",
    "the model is in training mode",
    "Call model.eval() first.",
)
CONVERT_FLOAT32: Final = Cure(
    "convert: the float32 model",
    "the model is a converted one",
    "Convert the float32 model.",
)
CONVERT_UNSCRIPTED: Final = Cure(
    "convert: the model that was scripted",
    "the model is a TorchScript module",
    "Convert the model that was scripted.",
)
CONVERT_INSIDE: Final = Cure(
    "convert: the model inside a wrapper",
    "the model is a wrapper, such as DataParallel or a compiled module",
    "Convert the model inside, then wrap or compile that.",
)
CONVERT_META: Final = Cure(
    "convert: values instead of the meta device",
    "a weight is on the meta device",
    "Load them first; precast.load_converted does both.",
)
CONVERT_DEVICE: Final = Cure(
    "convert: a device with rules",
    "the policy has no rules for the device of the model",
    "Move the model to a device that the policy has rules for, or give the policy rules for this one.",
)
CONVERT_IN_PLACE: Final = Cure(
    "convert: in place",
    "the model cannot be copied",
    "Convert it in place: convert(model, ..., in_place=True).",
)
CONVERT_ARGUMENTS: Final = Cure(
    "convert: the arguments of one call",
    "the model fails on the example",
    "Pass the arguments of one call: a tensor, a tuple of positional arguments, or a dict of keyword arguments; a list "
    "has one of these for each call.",
)
CONVERT_PATH: Final = Cure(
    "convert: an example of the path",
    "a call of a converted model uses a 16-bit weight in float32",
    "Convert the model again, with an example that takes this path: convert(model, ..., example=[one, another]).",
)
CONVERT_FUNC: Final = Cure(
    "convert: a transform of the float32 model",
    "a transform of torch.func reaches a weight stored in 16 bits",
    "Transform the float32 model in a region.",
)
CONVERT_INFERENCE: Final = Cure(
    "convert: inference only",
    "a converted model is called in training mode",
    "Call model.eval(), or train the float32 model and convert it again.",
)
CONVERT_TRACE: Final = Cure(
    "convert: a trace or an export instead of a script",
    "torch.jit.script gets a converted model",
    "Record it with torch.jit.trace(model, example), or write a program with precast.export.",
)
LOAD_FUNCTION: Final = Cure(
    "load_converted: the function that creates the model",
    "a buffer on the meta device is in no state dict",
    "Pass load_converted the function that creates the model instead of a model on the meta device: it creates such "
    "buffers with their values.",
)
LOAD_EXAMPLE: Final = Cure(
    "load_converted: an example for float32 weights",
    "the checkpoint has float32 weights only, and there is no example",
    "Pass an example of a call, to observe the dtypes in which the policy uses the weights: "
    "load_converted(..., example=...).",
)
EXPORT_UNSCRIPTED: Final = Cure(
    "export: the module that was scripted",
    "the model is a TorchScript module",
    "export the module that was scripted",
)
EXPORT_TUPLE: Final = Cure(
    "export: a tuple of arguments",
    "the arguments are not in a tuple",
    "a single argument is written `(x,)`",
)
EXPORT_RETARGET: Final = Cure(
    "export: rules of another device",
    "the policy has rules for other devices than that of the model",
    'Move the model, or apply the rules of another device: policy.retarget("{device}", like="{like}")',
)
EXPORT_COND: Final = Cure(
    "export: control flow on data",
    "torch.export reports control flow that depends on data",
    "write it with torch.cond, or make the decision outside of the model.",
)
EXPORT_DETACH: Final = Cure(
    "export: detach instead of data",
    "torch.export records a tensor without values as a constant",
    "Write `.detach()` instead.",
)
EXPORT_RULE: Final = Cure(
    "export: a rule for the operation",
    "an operation without a rule calls operations with rules, depending on values",
    'Give it a rule, as in policy.replace(ops={{"{name}": "fp32"}}), or call it outside of regions',
)

# --- weights that are stored in bfloat16 ---

BFLOAT16_BEFORE_DDP: Final = Cure(
    "bfloat16_weights: before DistributedDataParallel",
    "the model is wrapped in DistributedDataParallel, and the dtype of a parameter has to change",
    "Call bfloat16_weights first, then wrap the model.",
)
BFLOAT16_DENSE: Final = Cure(
    "bfloat16_weights: dense gradients",
    "a weight in bfloat16 has a sparse gradient",
    "remove sparse=True from nn.Embedding, or give that module's weight another optimizer.",
)

ACCUMULATE_UNDER_FSDP: Final = Cure(
    "bfloat16_weights: accumulation under FSDP",
    "gradients in float32 are asked for, and a weight is sharded",
    "Let FSDP do it in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32), and "
    "model.set_requires_gradient_sync(False) in all passes but the last.",
)

# --- rules for modules ---

EXACT_RULE: Final = Cure(
    "modules: a rule for the module itself",
    "two patterns with different rules match a module",
    "Add a rule for {name} itself, which decides, or make one of the patterns narrower.",
)
ONE_RULE: Final = Cure(
    "modules: one rule for a module with two names",
    "a module has two names with different rules",
    "Write one rule, or the same for both names.",
)
WHOLE_ATTENTION: Final = Cure(
    "modules: a rule for the attention",
    "a rule for the output projection of nn.MultiheadAttention",
    "Write a rule for the attention as a whole.",
)
LOWER_AGAIN: Final = Cure(
    "modules: a float8 rule where autocast is off",
    "a float8 rule for a module inside one with the rule fp32",
    'To switch it on again, write {{ dtype = "lower", ops = {{ linear = "{rule}" }} }}.',
)
WHOLE_SCRIPTED: Final = Cure(
    "modules: a rule for the scripted module",
    "a rule for a module that is scripted as a part of another",
    "Write a rule for {name} as a whole, and none for the modules in it.",
)
