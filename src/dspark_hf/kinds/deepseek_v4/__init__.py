"""The DSpark drafter that is embedded in DeepSeek-V4's checkpoints."""
