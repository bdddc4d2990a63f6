"""Hugging Face's Trainer with Anova: a small GPT-2 from a config, on text that is generated here.
python examples/recipes/hugging_face.py       needs transformers and accelerate
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from blockmean import Anova, diagnose, param_groups

CONTEXT = 32
text = "".join(f"{a} + {b} = {a + b}\n" for a in range(30) for b in range(30))
characters = sorted(set(text))
tokens = torch.tensor([characters.index(c) for c in text])
samples = [{"input_ids": row, "labels": row} for row in tokens.unfold(0, CONTEXT, CONTEXT // 2)]

torch.manual_seed(0)
sizes = {"vocab_size": len(characters), "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=60,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=20,
        report_to="none",
        use_cpu=True,
    )
    options = {"params": param_groups(model, weight_decay=0.1), "lr": args.learning_rate}
    trainer = Trainer(model, args, train_dataset=samples, optimizer_cls_and_kwargs=(Anova, options))
    trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {entry['loss']:.3f}, rate {entry['learning_rate']:.5f}")
print(diagnose(trainer.optimizer))
