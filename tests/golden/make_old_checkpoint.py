"""A checkpoint as commit 21bede1 wrote it, and the losses of the steps after it: bfloat16 on float32 masters, SFT.

Run it in a checkout of that commit: python make_old_checkpoint.py FOLDER. It makes FOLDER/checkpoint-2 and prints the
losses of steps 3 and 4.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, ".")

from cukit import SFTConfig, SFTTrainer
from cukit.backend import backend_for
from cukit.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.tokenizer import Tokenizer

TOKENIZER = Path("data/tiny-qwen3")
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
model = Decoder(
    ModelConfig.from_json(json.loads((TOKENIZER / "config.json").read_text()) | SHAPE), backend_for("cpu"), "bfloat16"
)
model.init_weights(3)
rows = [{"prompt": "1" + "+1" * i + "=", "completion": str(i + 1)} for i in range(6)]
args = SFTConfig(
    output_dir=sys.argv[1],
    learning_rate=1e-2,
    max_steps=4,
    logging_steps=1,
    save_steps=2,
    per_device_train_batch_size=1,
    num_train_epochs=1,
)
trainer = SFTTrainer(model, args=args, train_dataset=rows, processing_class=Tokenizer.from_folder(TOKENIZER))
trainer.train()
lines = (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()
print([json.loads(line)["loss"] for line in lines][2:])
