"""Fine-tune a tiny Llama with the Hugging Face Trainer: python hf_train.py OUT.

An ordinary script; it mentions no monitoring of any kind.
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Numbers(torch.utils.data.Dataset):
    """Counting, modulo something."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) * (1 + i % 5) + i) % 60
        return {"input_ids": ids, "labels": ids.clone()}


class Trained(Trainer):
    """With a broken step in the middle, if asked."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if os.environ.get("BAD_STEP") == str(self.state.global_step):
            loss = loss * float("nan")
        return loss


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=f"{sys.argv[1]}-trainer",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=20,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
    )
    trainer = Trained(model=model, args=arguments, train_dataset=Numbers())
    trainer.train()
    torch.save(model.state_dict(), f"{sys.argv[1]}-rank0.pt")


if __name__ == "__main__":
    main()
