"""The rollout engine: sequences, KV blocks, scheduler, model runner, and LLM, its public interface."""
