"""The Transformers Trainer on precast: a callback brings the policy, the scaler and a monitor, and takes them away.

    python examples/integrations/with_transformers.py

Needs `pip install transformers`; nothing is downloaded. A small GPT-2 learns to count, with its last layer
in float32: in float16 under a scaler where there is a GPU, else in bfloat16.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import precast
from precast.integrations.transformers import PrecastCallback

LENGTH, WORDS, STEPS = 8, 16, 60


def main() -> None:
    """Trains, and tells what was seen."""
    torch.manual_seed(0)
    is_gpu = torch.cuda.is_available()
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    )
    counts = [(torch.arange(LENGTH) + start) % WORDS for start in range(WORDS)]
    policy = precast.Policy.load("default").replace(modules={"lm_head": "fp32"})
    callback = PrecastCallback(policy, every=20)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            fp16=is_gpu,
            bf16=not is_gpu,
            use_cpu=not is_gpu,
            max_steps=STEPS,
            learning_rate=1e-2,
            per_device_train_batch_size=16,
            logging_steps=STEPS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = [{"input_ids": count, "labels": count} for count in counts]
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
        trainer.train()
        print(f"loss     {trainer.evaluate(rows)['eval_loss']:.4f}")
    print(f"logged   {', '.join(sorted(trainer.state.log_history[0]))}")
    if callback.used is not None:
        [monitor] = callback.used.monitors
        largest = max(
            (max(entry["maximum"]), entry["name"])
            for entry in monitor.to_dict()["modules"]
            if entry["kind"] == "output"
        )
        print(f"largest  {largest[0]:.1f} in the output of {largest[1]}")


if __name__ == "__main__":
    main()
