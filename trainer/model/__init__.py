"""The learner's model: a Megatron-core GPT built from a Hugging Face config, with our own attention and norm."""
