"""Fine-tuning of the codec and the talker. Meets the engine only in a checkpoint folder, as a user's program would."""
