"""backend=openai: engines that run elsewhere and speak OpenAI's API."""
