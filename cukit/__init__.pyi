from .autograd import Tensor as Tensor
from .engine.calls import LoRARequest as LoRARequest
from .engine.config import EngineConfig as EngineConfig
from .engine.config import SamplingParams as SamplingParams
from .engine.llm import LLM as LLM
from .ops import policy_loss as policy_loss
from .trainers.config import SFTConfig as SFTConfig
from .trainers.config import TrainerConfig as TrainerConfig
from .trainers.environment import Environment as Environment
from .trainers.grpo import GRPOTrainer as GRPOTrainer
from .trainers.grpo_config import GRPOConfig as GRPOConfig
from .trainers.ppo import PPOTrainer as PPOTrainer
from .trainers.ppo_config import PPOConfig as PPOConfig
from .trainers.reward import RewardTrainer as RewardTrainer
from .trainers.reward_config import RewardConfig as RewardConfig
from .trainers.sft import SFTTrainer as SFTTrainer
from .trainers.trainer import TrainerCallback as TrainerCallback

__version__: str
